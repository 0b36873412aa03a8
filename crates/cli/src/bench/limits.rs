//! The limits of this machine's processors, measured where they are to be used: in the process and on the threads of a bench.

use std::time::Duration;

use qwen_bench::Limits;
use qwen_cpu::probe::{Multiply, Stream, multiply_rate};

use crate::memory::available_bytes;

/// Several times what caches hold, on most machines.
const WANTED_BYTES: u64 = 1 << 30;
const READ_TIME: Duration = Duration::from_millis(120);
const MULTIPLY_TIME: Duration = Duration::from_millis(30);
const REPETITIONS: usize = 5;

/// Measures in under two seconds.
pub(super) fn measure(threads: usize) -> Option<Limits> {
    let bytes = available_bytes().map_or(WANTED_BYTES, |free| WANTED_BYTES.min(free / 4));
    let stream = Stream::new(usize::try_from(bytes).unwrap_or(usize::MAX), threads);
    let once = |_| Limits {
        read_bytes_per_second: stream.read_rate(threads, READ_TIME),
        int8_operations_per_second: multiply_rate(Multiply::Int8, threads, MULTIPLY_TIME),
        int8_matrix_operations_per_second: multiply_rate(Multiply::Int8Matrix, threads, MULTIPLY_TIME),
        bf16_operations_per_second: multiply_rate(Multiply::Bf16, threads, MULTIPLY_TIME),
        f32_operations_per_second: multiply_rate(Multiply::F32, threads, MULTIPLY_TIME),
    };
    let measured: Vec<Limits> = (0..REPETITIONS).map(once).collect();
    Limits::median(&measured)
}
