//! What a launch costs beside its kernel, and what fork and join cost: `cargo run --release -p qwen-cpu --example
//! launch_overhead`. Compare only figures of one run.
#![expect(clippy::print_stdout, reason = "prints its result")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use qwen_hal::abi::{QHAL_USAGE_ACTIVATION, ops};
use qwen_hal::{
    BufferDesc, ComputePool, Device, Dim, Host, LaunchArgs, OpDesc, PlanOptions, Plugin, Pool, Scope, Stream,
    TensorDesc,
};

/// Calls timed together, and how often. Short rounds and their median leave out those in which the thread lost its core.
const CALLS: usize = 10;
const ROUNDS: usize = 5_000;

/// Median nanoseconds per call.
fn median(mut body: impl FnMut()) -> f64 {
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            (0..CALLS).for_each(|_| body());
            start.elapsed().as_nanos() as f64 / CALLS as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn launch(device: &Device, stream: &Stream, op: &OpDesc, what: &str) -> Result<(), Box<dyn Error>> {
    let plan = device.plan(op, &PlanOptions::default())?;
    let mut args = LaunchArgs::new(&plan);
    let alloc = |bytes: u64| device.alloc(&BufferDesc::new(bytes, QHAL_USAGE_ACTIVATION, Scope::Temporary, what));
    for i in 0..plan.num_inputs() {
        args.set_input(i, &alloc(plan.input_bytes(i))?.whole());
    }
    args.set_output(0, &alloc(plan.output_bytes(0))?.whole());
    let mut failed = None;
    let ns = median(|| failed = plan.launch(stream, &args).err().or(failed.take()));
    if let Some(error) = failed {
        return Err(error.into());
    }
    println!("{what:<44} {ns:>8.0} ns");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let threads = std::env::args().nth(1).and_then(|text| text.parse().ok());
    let pool = Arc::new(Pool::new(threads));
    println!("{} threads", pool.threads());
    let device = Plugin::linked(&qwen_cpu::PLUGIN, &Host::new(Arc::clone(&pool) as _))?.open(0, &[])?;
    let stream = device.stream("overhead")?;
    let tiny = |columns: usize| TensorDesc::f32(&[Dim::symbol(0, 1, 1), columns.into()]);
    let copy = OpDesc::new(ops::QHAL_OP_COPY).input(tiny(1)).output(tiny(1));
    launch(&device, &stream, &copy, "copy of 4 bytes, through the HAL")?;
    let add = OpDesc::new(ops::QHAL_OP_BINARY)
        .attr_int(ops::QHAL_ATTR_FUNCTION, ops::QHAL_BINARY_ADD)
        .input(tiny(16))
        .input(tiny(16))
        .output(tiny(16));
    launch(&device, &stream, &add, "sum of 16 values, through the HAL")?;
    let tasks = pool.threads();
    // Each task waits until all have begun, so every thread has to come: a fork and a join across cores.
    let meet = || {
        let begun = AtomicUsize::new(0);
        pool.run(tasks, &|_| {
            begun.fetch_add(1, Ordering::AcqRel);
            while begun.load(Ordering::Acquire) < tasks {
                std::hint::spin_loop();
            }
        });
    };
    println!("{:<44} {:>8.0} ns", "fork, meeting of all threads, join", median(meet));
    println!("{:<44} {:>8.0} ns", "fork and join of 64 empty tasks", median(|| pool.run(64, &|_| {})));
    Ok(())
}
