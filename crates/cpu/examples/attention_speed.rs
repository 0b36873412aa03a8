//! Measures attention: decode by cached bytes a second, prefill by operations a second.
//!
//! `cargo run --release -p qwen-cpu --example attention_speed -- [threads] [part of a line] [rounds] [MiB]`: the second argument
//! selects lines by a part of their name, the third says how often each is run (median and best are printed), the fourth how
//! large the caches of all layers may be together (by default 128: read from memory and not from a processor cache).

use std::hint::spin_loop;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use qwen_cpu::isa::Isa;
use qwen_cpu::kernels::attention::{
    AttentionArgs, Products, Sequences, StepLimits, attention, attention_workspace_bytes,
};
use qwen_cpu::kernels::cache::CacheView;
use qwen_cpu::matrix::{Matrix, MatrixMut};
use qwen_cpu::parallel::Parallel;
use qwen_formats::DType;

type Body<'a> = &'a (dyn Fn(usize) + Sync);

/// Threads that wait spinning, as those of a pool do between the launches of a step.
struct Spinners {
    threads: usize,
    epoch: AtomicUsize,
    next: AtomicUsize,
    tasks: AtomicUsize,
    left: AtomicUsize,
    body: Mutex<Option<Body<'static>>>,
    stop: AtomicBool,
}

impl Spinners {
    fn new(threads: usize) -> Self {
        let zero = || AtomicUsize::new(0);
        let (body, stop) = (Mutex::new(None), AtomicBool::new(false));
        Self { threads, epoch: zero(), next: zero(), tasks: zero(), left: zero(), body, stop }
    }

    fn work(&self) {
        let mut seen = 0;
        while !self.stop.load(Ordering::Acquire) {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch == seen {
                spin_loop();
                continue;
            }
            seen = epoch;
            let body = self.body.lock().ok().and_then(|body| *body);
            if let Some(body) = body {
                self.take(body);
            }
            self.left.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn take(&self, body: Body<'_>) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= self.tasks.load(Ordering::Relaxed) {
                return;
            }
            body(task);
        }
    }
}

impl Parallel for Spinners {
    fn threads(&self) -> usize {
        self.threads
    }
    fn run(&self, tasks: usize, body: Body<'_>) {
        // SAFETY: every worker has passed `left` before this returns, so nobody keeps the reference.
        let longer: Body<'static> = unsafe { std::mem::transmute::<Body<'_>, Body<'static>>(body) };
        if let Ok(mut slot) = self.body.lock() {
            *slot = Some(longer);
        }
        self.tasks.store(tasks, Ordering::Relaxed);
        self.next.store(0, Ordering::Relaxed);
        self.left.store(self.threads - 1, Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::Release);
        self.take(body);
        while self.left.load(Ordering::Acquire) > 0 {
            spin_loop();
        }
    }
}

struct Shape {
    name: &'static str,
    heads: usize,
    key_value_heads: usize,
    dim: usize,
    layers: usize,
}

const SHAPES: [Shape; 3] = [
    Shape { name: "SmolLM2-135M", heads: 9, key_value_heads: 3, dim: 64, layers: 30 },
    Shape { name: "Qwen2-1.5B", heads: 12, key_value_heads: 2, dim: 128, layers: 28 },
    Shape { name: "Qwen3-8B", heads: 32, key_value_heads: 8, dim: 128, layers: 36 },
];

/// Some values in memory as a runtime has it: in huge pages where the system gives them.
fn huge(bytes: usize) -> &'static [u8] {
    const PAGE: usize = 2 << 20;
    let memory = vec![0u8; bytes + PAGE].leak();
    let skew = memory.as_ptr().align_offset(PAGE);
    let memory = &mut memory[skew..][..bytes];
    #[cfg(target_os = "linux")]
    {
        const HUGE: i32 = 14;
        unsafe extern "C" {
            fn madvise(at: *mut u8, bytes: usize, advice: i32) -> i32;
        }
        // SAFETY: advice on this memory alone.
        unsafe { madvise(memory.as_mut_ptr(), bytes, HUGE) };
    }
    for (i, x) in memory.iter_mut().enumerate() {
        // Small numbers as half precision and as bfloat16.
        *x = if i % 2 == 0 { (i * 37 / 2) as u8 } else { 0x30 };
    }
    memory
}

/// Median and least seconds of one step of a layer.
fn measure(
    isa: Isa,
    pool: &dyn Parallel,
    shape: &Shape,
    contexts: &[usize],
    tokens: usize,
    (rounds, cached): (usize, usize),
    (dtype, products): (DType, Products),
) -> (f64, f64) {
    let block_size = 16;
    let args = AttentionArgs {
        num_heads: shape.heads,
        num_key_value_heads: shape.key_value_heads,
        head_dim: shape.dim,
        value_dim: shape.dim,
        block_size,
        scale: 0.1,
        window: 0,
        products,
    };
    let block_bytes = 2 * shape.key_value_heads * shape.dim * block_size * 2;
    let sequences = contexts.len();
    let most = contexts.iter().copied().max().unwrap_or(0);
    let width_in_blocks = most.div_ceil(block_size);
    let blocks: usize = contexts.iter().map(|n| n.div_ceil(block_size)).sum();
    let layers = (cached / (block_bytes * blocks)).clamp(1, shape.layers);
    let memory = huge((block_bytes * blocks * layers).next_multiple_of(4096));
    let caches = memory.chunks_exact(block_bytes * blocks);
    let rows = sequences * tokens;
    let q: Vec<f32> = (0..rows * shape.heads * shape.dim).map(|i| (i * 31 % 17) as f32 * 0.1 - 0.8).collect();
    let mut out = vec![0.0; q.len()];
    let query_start: Vec<i32> = (0..=sequences).map(|s| (s * tokens) as i32).collect();
    let context_len: Vec<i32> = contexts.iter().map(|&n| n as i32).collect();
    let mut next = 0;
    let table: Vec<i32> = contexts
        .iter()
        .flat_map(|n| {
            let (first, used) = (next, n.div_ceil(block_size) as i32);
            next += used;
            (0..width_in_blocks as i32).map(move |i| if i < used { first + i } else { -1 })
        })
        .collect();
    let limits = StepLimits { threads: pool.threads(), sequences, tokens: rows, max_context: most };
    let mut workspace = vec![0; attention_workspace_bytes(&args, &limits)];
    let mut times: Vec<f64> = (0..rounds.max(1))
        .map(|_| {
            let start = Instant::now();
            for cache in caches.clone().take(layers) {
                let step = Sequences {
                    query_start: &query_start,
                    context_len: &context_len,
                    block_table: Matrix::dense(&table, sequences, width_in_blocks),
                };
                let width = shape.heads * shape.dim;
                let done = attention(
                    isa,
                    pool,
                    &args,
                    Matrix::dense(&q, rows, width),
                    CacheView::new(cache, dtype, block_bytes),
                    &step,
                    MatrixMut::dense(&mut out, rows, width),
                    &mut workspace,
                );
                assert!(done.is_ok(), "{done:?}");
            }
            start.elapsed().as_secs_f64() / layers as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[0])
}

#[expect(clippy::print_stdout, reason = "a command-line tool")]
fn report(pool: &dyn Parallel, wanted: &str, rounds: (usize, usize)) {
    for isa in Isa::available().into_iter().rev().filter(|&isa| isa != Isa::Scalar) {
        let forms = [(DType::F16, Products::F32, "f16"), (DType::BF16, Products::Bf16, "pairs")];
        for (shape, (dtype, products, form)) in SHAPES.iter().flat_map(|shape| forms.map(|form| (shape, form))) {
            let name = |what: &str| {
                Some(format!("{} {} {form} {what}", isa.name(), shape.name)).filter(|n| n.contains(wanted))
            };
            let form = (dtype, products);
            let mixed: Vec<usize> = (0..16).map(|i| 64 + i * 128).collect();
            for (what, contexts) in [
                ("decode 1 x 512", vec![512]),
                ("decode 1 x 4096", vec![4096]),
                ("decode 1 x 8192", vec![8192]),
                ("decode 16 x 1024", vec![1024; 16]),
                ("decode 32 x 160", vec![160; 32]),
                ("decode 16 x 64..1984", mixed),
            ] {
                let Some(name) = name(what) else { continue };
                let (median, best) = measure(isa, pool, shape, &contexts, 1, rounds, form);
                let bytes = (contexts.iter().sum::<usize>() * shape.key_value_heads * shape.dim * 2 * 2) as f64;
                let rate = bytes / median / 1e9;
                println!("{name}: {:.0} us a layer (best {:.0}), {rate:.1} GB/s", median * 1e6, best * 1e6);
            }
            for tokens in [512, 2048] {
                let Some(name) = name(&format!("prefill {tokens}")) else { continue };
                let (median, best) = measure(isa, pool, shape, &[tokens], tokens, rounds, form);
                let ops = (tokens * (tokens + 1) / 2 * shape.heads * shape.dim * 4) as f64;
                let rate = ops / median / 1e9;
                println!("{name}: {:.0} us a layer (best {:.0}), {rate:.1} GFLOP/s", median * 1e6, best * 1e6);
            }
        }
    }
}

fn main() {
    let argument = |i: usize| std::env::args().nth(i);
    let threads = argument(1).and_then(|n| n.parse().ok()).unwrap_or(2);
    let wanted = argument(2).unwrap_or_default();
    let rounds = argument(3).and_then(|n| n.parse().ok()).unwrap_or(7);
    let cached = argument(4).and_then(|n| n.parse::<usize>().ok()).unwrap_or(128) << 20;
    let pool = Spinners::new(threads);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| pool.work());
        }
        report(&pool, &wanted, (rounds, cached));
        pool.stop.store(true, Ordering::Release);
    });
}
