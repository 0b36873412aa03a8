//! Measures attention: decode by cached bytes a second, prefill by operations a second.
//!
//! `cargo run --release -p qwen-cpu --example attention_speed -- [threads]`

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use qwen_cpu::isa::Isa;
use qwen_cpu::kernels::attention::{AttentionArgs, Sequences, StepLimits, attention, attention_workspace_bytes};
use qwen_cpu::kernels::cache::CacheView;
use qwen_cpu::matrix::{Matrix, MatrixMut};
use qwen_cpu::parallel::Parallel;
use qwen_formats::DType;

/// Starts threads for each launch: simple, and a few tens of microseconds slower than a pool.
struct Threads(usize);

impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.0
    }
    fn run(&self, tasks: usize, body: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(task) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&task| task < tasks) {
                body(task);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.0.min(tasks) {
                scope.spawn(work);
            }
            work();
        });
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

/// Seconds of one step, best of some.
fn measure(isa: Isa, threads: usize, shape: &Shape, sequences: usize, tokens: usize, context: usize) -> f64 {
    let block_size = 16;
    let args = AttentionArgs {
        num_heads: shape.heads,
        num_key_value_heads: shape.key_value_heads,
        head_dim: shape.dim,
        value_dim: shape.dim,
        block_size,
        scale: 0.1,
        window: 0,
    };
    let block_bytes = 2 * shape.key_value_heads * shape.dim * block_size * 2;
    let blocks = context.div_ceil(block_size);
    // Several layers, so that the cache is read from memory and not from a processor cache.
    let layers = ((1 << 27) / (block_bytes * blocks * sequences)).clamp(1, shape.layers);
    let caches: Vec<Vec<u8>> = (0..layers)
        .map(|_| {
            (0..block_bytes * blocks * sequences).map(|i| if i % 2 == 0 { (i * 37 / 2) as u8 } else { 0x30 }).collect()
        })
        .collect();
    let rows = sequences * tokens;
    let q: Vec<f32> = (0..rows * shape.heads * shape.dim).map(|i| (i * 31 % 17) as f32 * 0.1 - 0.8).collect();
    let mut out = vec![0.0; q.len()];
    let query_start: Vec<i32> = (0..=sequences).map(|s| (s * tokens) as i32).collect();
    let context_len = vec![context as i32; sequences];
    let table: Vec<i32> = (0..(sequences * blocks) as i32).collect();
    let limits = StepLimits { threads, sequences, tokens: rows, max_context: context };
    let mut workspace = vec![0; attention_workspace_bytes(&args, &limits)];
    let mut best = f64::INFINITY;
    for _ in 0..7 {
        let start = Instant::now();
        for cache in &caches {
            let step = Sequences {
                query_start: &query_start,
                context_len: &context_len,
                block_table: Matrix::dense(&table, sequences, blocks),
            };
            let width = shape.heads * shape.dim;
            let done = attention(
                isa,
                &Threads(threads),
                &args,
                Matrix::dense(&q, rows, width),
                CacheView::new(cache, DType::F16, block_bytes),
                &step,
                MatrixMut::dense(&mut out, rows, width),
                &mut workspace,
            );
            assert!(done.is_ok(), "{done:?}");
        }
        best = best.min(start.elapsed().as_secs_f64() / layers as f64);
    }
    best
}

#[expect(clippy::print_stdout, reason = "a command-line tool")]
fn main() {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(2);
    for isa in Isa::available().into_iter().rev().filter(|&isa| isa != Isa::Scalar) {
        for shape in &SHAPES {
            for (sequences, context) in [(1, 512), (1, 4096), (1, 8192), (16, 1024)] {
                let seconds = measure(isa, threads, shape, sequences, 1, context);
                let bytes = (sequences * context * shape.key_value_heads * shape.dim * 2 * 2) as f64;
                println!(
                    "{} {} decode {sequences} x {context}: {:.0} us a layer, {:.1} GB/s",
                    isa.name(),
                    shape.name,
                    seconds * 1e6,
                    bytes / seconds / 1e9
                );
            }
            for tokens in [512, 2048] {
                let seconds = measure(isa, threads, shape, 1, tokens, tokens);
                let ops = (tokens * (tokens + 1) / 2 * shape.heads * shape.dim * 4) as f64;
                println!(
                    "{} {} prefill {tokens}: {:.0} us a layer, {:.1} GFLOP/s",
                    isa.name(),
                    shape.name,
                    seconds * 1e6,
                    ops / seconds / 1e9
                );
            }
        }
    }
}
