//! A device opened as the runtime opens it, and ops run with guard bytes around what they write.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    reason = "each test file uses its part; helpers are part of tests"
)]

use std::sync::{Arc, OnceLock};

use qwen_hal::abi::{QHAL_USAGE_ACTIVATION, QHAL_USAGE_WORKSPACE};
use qwen_hal::{
    Buffer, BufferDesc, Device, Host, LaunchArgs, LaunchError, OpDesc, Plan, PlanOptions, Plugin, Pool, Scope, Stream,
};

/// Bytes before and after each output.
const GUARD: u64 = 64;
const GUARD_BYTE: u8 = 0xa5;

/// The device of the process, on a pool of two threads.
pub fn device() -> &'static Device {
    static DEVICE: OnceLock<Device> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let host = Host::new(Arc::new(Pool::new(Some(2))));
        Plugin::linked(&qwen_cpu::PLUGIN, &host).unwrap().open(0, &[]).unwrap()
    })
}

pub fn alloc(size: u64) -> Buffer {
    device().alloc(&BufferDesc::new(size, QHAL_USAGE_ACTIVATION, Scope::Temporary, "test")).unwrap()
}

pub fn bytes_of<T: Copy>(values: &[T]) -> Vec<u8> {
    // SAFETY: tests use plain numbers.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }.to_vec()
}

pub fn values_of<T: Copy + Default>(bytes: &[u8]) -> Vec<T> {
    let mut values = vec![T::default(); bytes.len() / size_of::<T>()];
    // SAFETY: plain numbers, and the sizes agree.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), values.as_mut_ptr().cast::<u8>(), bytes.len()) };
    values
}

/// A buffer with these values.
pub fn upload<T: Copy>(stream: &Stream, values: &[T]) -> Buffer {
    let bytes = bytes_of(values);
    let buffer = alloc(bytes.len().max(1) as u64);
    stream.copy_from_host(&bytes, &buffer.slice(0, bytes.len() as u64).unwrap()).unwrap();
    buffer
}

pub fn download(stream: &Stream, buffer: &Buffer, offset: u64, size: u64) -> Vec<u8> {
    let mut bytes = vec![0; size as usize];
    stream.copy_to_host(&buffer.slice(offset, size).unwrap(), &mut bytes).unwrap();
    bytes
}

/// Runs an op once. `None` is an absent operand. Weights that the plan packs are packed first. Outputs begin as guard bytes.
pub fn try_run(op: &OpDesc, inputs: &[Option<Vec<u8>>], symbols: &[i64]) -> Result<Vec<Vec<u8>>, LaunchError> {
    let device = device();
    let stream = device.stream("test").unwrap();
    let plan = device.plan(op, &PlanOptions::default()).unwrap();
    let mut args = LaunchArgs::new(&plan);
    for (i, input) in inputs.iter().enumerate() {
        if let Some(bytes) = input {
            args.set_input(i, &packed(&plan, &stream, i, &upload(&stream, bytes)).whole());
        }
    }
    let outputs: Vec<Buffer> = (0..plan.num_outputs()).map(|o| alloc(plan.output_bytes(o) + 2 * GUARD)).collect();
    for (o, buffer) in outputs.iter().enumerate() {
        stream.fill(&buffer.whole(), &[GUARD_BYTE]).unwrap();
        args.set_output(o, &buffer.slice(GUARD, plan.output_bytes(o)).unwrap());
    }
    let workspace = plan.info().workspace_bytes;
    if workspace > 0 {
        let desc = BufferDesc::new(workspace + 2 * GUARD, QHAL_USAGE_WORKSPACE, Scope::Temporary, "workspace");
        let buffer = device.alloc(&desc).unwrap();
        stream.fill(&buffer.whole(), &[0xff]).unwrap();
        args.set_workspace(&buffer.slice(GUARD, workspace).unwrap());
        launch(&plan, &stream, &mut args, symbols)?;
        assert!(download(&stream, &buffer, 0, GUARD).iter().all(|b| *b == 0xff), "written before the workspace");
        assert!(download(&stream, &buffer, GUARD + workspace, GUARD).iter().all(|b| *b == 0xff), "written behind it");
    } else {
        launch(&plan, &stream, &mut args, symbols)?;
    }
    let check = |(o, buffer): (usize, &Buffer)| {
        let bytes = plan.output_bytes(o);
        for at in [0, GUARD + bytes] {
            let guard = download(&stream, buffer, at, GUARD);
            assert!(guard.iter().all(|b| *b == GUARD_BYTE), "{}: bytes around output {o} were written", op.name());
        }
        download(&stream, buffer, GUARD, bytes)
    };
    Ok(outputs.iter().enumerate().map(check).collect())
}

fn launch(plan: &Plan, stream: &Stream, args: &mut LaunchArgs, symbols: &[i64]) -> Result<(), LaunchError> {
    for (i, value) in symbols.iter().enumerate() {
        args.set_symbol(i, *value);
    }
    plan.launch(stream, args)
}

/// The operand as the plan wants it.
pub fn packed(plan: &Plan, stream: &Stream, input: usize, source: &Buffer) -> Buffer {
    let bytes = plan.info().packed_bytes[input];
    if bytes == 0 {
        return source.clone();
    }
    let target = alloc(bytes);
    plan.prepack(stream, input, &source.whole(), &target.whole()).unwrap();
    target
}

pub fn run(op: &OpDesc, inputs: &[Option<Vec<u8>>], symbols: &[i64]) -> Vec<Vec<u8>> {
    try_run(op, inputs, symbols).unwrap()
}

/// Reproducible values in -1..1.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    pub fn f32s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.next() as f32 / (1_u64 << 30) as f32 - 1.0).collect()
    }
}

pub fn close(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        let limit = tolerance * e.abs().max(1.0);
        assert!((f64::from(*f) - e).abs() <= limit, "{what}[{i}]: {f}, expected {e}");
    }
}
