//! How fast the products are, beside what the machine can do in the same minutes.
//!
//! `cargo run --release -p qwen-cpu --example gemm_bench [-- FILTER]`: for each type and shape the rate of reading weights with one
//! row (weights cycle through more memory than the caches hold) and the rate of products with 16 and 512 rows. FILTER is part
//! of a line's label, e.g. `q4_0`. Threads: `GEMM_BENCH_THREADS`, default all. With `GEMM_BENCH_ROWS=8,16,64` instead: the rate of
//! products with so many rows in every way, in turns, or in those of `GEMM_BENCH_WAYS=amx,avx512`; medians of `GEMM_BENCH_ROUNDS`,
//! default 9.

#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a measuring tool")]

use std::hint::{black_box, spin_loop};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use qwen_cpu::isa::Isa;
use qwen_cpu::kernels::gemm::{Compute, Epilogue, Segment, Way, WeightLayout, gemm, workspace_bytes};
use qwen_cpu::matrix::{Matrix, MatrixMut};
use qwen_cpu::parallel::Parallel;
use qwen_formats::DType;

/// Memory that one-row runs cycle through: four times the largest cache around.
const STREAM_BYTES: usize = 256 << 20;

type Body<'a> = &'a (dyn Fn(usize) + Sync);

/// Threads that spin for work.
struct Spinners {
    threads: usize,
    epoch: AtomicUsize,
    next: AtomicUsize,
    left: AtomicUsize,
    tasks: AtomicUsize,
    body: std::sync::Mutex<Option<Body<'static>>>,
    stop: AtomicBool,
}

impl Spinners {
    fn new(threads: usize) -> Self {
        Self {
            threads,
            epoch: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
            tasks: AtomicUsize::new(0),
            body: std::sync::Mutex::new(None),
            stop: AtomicBool::new(false),
        }
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
            let body = *self.body.lock().unwrap();
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
        *self.body.lock().unwrap() = Some(longer);
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

/// Time so far: of the thread itself if `own`, so that a loaded machine disturbs less; otherwise of the clock on the wall.
fn now(own: bool) -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    #[cfg(target_os = "linux")]
    if own {
        const THREAD_CPU_TIME: i32 = 3;
        unsafe extern "C" {
            fn clock_gettime(clock: i32, time: *mut [i64; 2]) -> i32;
        }
        let mut time = [0; 2];
        // SAFETY: seconds and nanoseconds, as 64-bit Linux has them.
        unsafe { clock_gettime(THREAD_CPU_TIME, &mut time) };
        return Duration::new(time[0] as u64, time[1] as u32);
    }
    let _ = own;
    START.get_or_init(Instant::now).elapsed()
}

/// Asks for huge pages, as the CPU's own buffers have them: with small ones, looking addresses up takes part of the time.
fn advise_huge<T>(memory: &mut [T]) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: i32 = 14;
        const PAGE: usize = 4096;
        unsafe extern "C" {
            fn madvise(at: *mut u8, bytes: usize, advice: i32) -> i32;
        }
        let (start, bytes) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
        let skip = start.align_offset(PAGE).min(bytes);
        // SAFETY: whole pages of memory that is ours; the advice changes no contents.
        unsafe { madvise(start.add(skip), (bytes - skip) / PAGE * PAGE, HUGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = memory;
}

/// Best seconds of a run, over a while.
fn best(pool: &dyn Parallel, mut run: impl FnMut()) -> f64 {
    run();
    let own = pool.threads() == 1;
    let (begin, mut best) = (Instant::now(), f64::INFINITY);
    while begin.elapsed() < Duration::from_millis(200) {
        let start = now(own);
        run();
        best = best.min((now(own) - start).as_secs_f64());
    }
    best
}

/// Seconds to read memory once, all threads.
fn read_rate(pool: &dyn Parallel, memory: &[u64]) -> f64 {
    let share = memory.len() / pool.threads();
    let seconds = best(pool, || {
        pool.run(pool.threads(), &|i| {
            let mut sums = [0u64; 32];
            for chunk in memory[i * share..(i + 1) * share].as_chunks::<32>().0 {
                for (sum, value) in sums.iter_mut().zip(chunk) {
                    *sum = sum.wrapping_add(*value);
                }
            }
            black_box(sums);
        });
    });
    (share * pool.threads() * 8) as f64 / seconds / 1e9
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vnni")]
fn dot_products(count: usize) -> i32 {
    use std::arch::x86_64::*;
    let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(-5)));
    let mut sums = [_mm512_setzero_si512(); 12];
    for _ in 0..count {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    sums.iter().map(|&sum| _mm512_reduce_add_epi32(sum)).fold(0, i32::wrapping_add)
}

/// int8 products per second, in units of 10^9 operations.
fn product_rate(pool: &dyn Parallel) -> Option<f64> {
    #[cfg(target_arch = "x86_64")]
    if Isa::current() >= Isa::Avx512 {
        const COUNT: usize = 100_000;
        let seconds = best(pool, || {
            pool.run(pool.threads(), &|_| {
                // SAFETY: the instructions were detected.
                black_box(unsafe { dot_products(COUNT) });
            });
        });
        return Some((pool.threads() * COUNT * 12 * 128) as f64 / seconds / 1e9);
    }
    let _ = pool;
    None
}

fn measure(pool: &dyn Parallel, dtype: DType, compute: Compute, n: usize, k: usize, memory: &[u64]) -> String {
    let layout = WeightLayout::for_dtype(dtype, n, k, None).unwrap();
    let bytes = layout.weight_bytes();
    let copies = (STREAM_BYTES / bytes).max(1);
    // Any bytes are weights; the speed doesn't depend on values. One copy follows the other.
    // SAFETY: the bytes of the words.
    let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), memory.len() * 8) };
    let most = 512;
    let x: Vec<f32> = (0..most * k).map(|i| (i * 7919 % 1013) as f32 / 506.0 - 1.0).collect();
    let mut out = vec![0.0; most * n];
    let mut workspace = vec![0; workspace_bytes(most, 1, &[(layout, compute)], pool.threads())];
    let mut go = |rows: usize, copy: usize| {
        let segment = Segment { weight: &memory[copy * bytes..][..bytes], layout, scales: None, bias: None, compute };
        let (x, y) = (Matrix::dense(&x, rows, k), MatrixMut::dense(&mut out, rows, n));
        gemm(Isa::current(), pool, x, &[segment], y, Epilogue::None, &mut workspace).unwrap();
    };
    let one = best(pool, || (0..copies).for_each(|copy| go(1, copy)));
    let cached = best(pool, || go(1, 0));
    let batch = best(pool, || (0..copies).for_each(|copy| go(16, copy)));
    let rows = [4, 16, 512].map(|rows| {
        let seconds = best(pool, || go(rows, 0));
        2.0 * (rows * n * k) as f64 / seconds / 1e9
    });
    format!(
        "{:6.1} GB/s {:8.2} us/matrix (cached {:8.2} us); GOP/s: 4 rows {:5.0}, 16 rows {:5.0} (from memory {:5.0}), 512 rows {:5.0}",
        (copies * bytes) as f64 / one / 1e9,
        one / copies as f64 * 1e6,
        cached * 1e6,
        rows[0],
        rows[1],
        2.0 * (16 * n * k * copies) as f64 / batch / 1e9,
        rows[2],
    )
}

/// Rates of products by number of rows and way, the medians of rounds in which the ways take turns; weights come from
/// memory that one row after the other is read from.
fn by_rows(pool: &dyn Parallel, dtype: DType, compute: Compute, [n, k]: [usize; 2], memory: &[u64], rows: &[usize]) {
    let rounds = std::env::var("GEMM_BENCH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(9);
    let layout = WeightLayout::for_dtype(dtype, n, k, None).unwrap();
    let bytes = layout.weight_bytes();
    // SAFETY: the bytes of the words.
    let memory = unsafe { std::slice::from_raw_parts(memory.as_ptr().cast::<u8>(), memory.len() * 8) };
    let copies = (STREAM_BYTES / bytes).clamp(1, 16);
    let most = rows.iter().copied().max().unwrap_or(1);
    let x: Vec<f32> = (0..most * k).map(|i| (i * 7919 % 1013) as f32 / 506.0 - 1.0).collect();
    let mut out = vec![0.0; most * n];
    let mut workspace = vec![0; workspace_bytes(most, 1, &[(layout, compute)], pool.threads())];
    let ways = Way::all(Isa::current());
    let wanted = std::env::var("GEMM_BENCH_WAYS").unwrap_or_default();
    let is_wanted = |way: &Way| match wanted.is_empty() {
        true => way.block_kib == ways[0].block_kib,
        false => wanted.split(',').any(|name| name == way.name()),
    };
    let ways: Vec<Way> = ways.iter().copied().filter(is_wanted).collect();
    let own = pool.threads() == 1;
    for &rows in rows {
        let mut seconds = vec![Vec::new(); ways.len()];
        for round in 0..=rounds {
            for (way, seconds) in ways.iter().zip(&mut seconds) {
                let start = now(own);
                for copy in 0..copies {
                    let weight = &memory[copy * bytes..][..bytes];
                    let segment = Segment { weight, layout, scales: None, bias: None, compute };
                    let (x, y) = (Matrix::dense(&x, rows, k), MatrixMut::dense(&mut out, rows, n));
                    gemm(*way, pool, x, &[segment], y, Epilogue::None, &mut workspace).unwrap();
                }
                if round > 0 {
                    seconds.push((now(own) - start).as_secs_f64());
                }
            }
        }
        print!("{dtype} {compute:?} {n}x{k} {rows:4} rows, Gop/s:");
        for (way, mut seconds) in ways.iter().zip(seconds) {
            seconds.sort_by(f64::total_cmp);
            let rate = 2.0 * (rows * n * k * copies) as f64 / seconds[rounds / 2] / 1e9;
            print!(" {} {rate:5.0}", way.name());
        }
        println!();
    }
}

fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var("GEMM_BENCH_THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(all);
    let rows = std::env::var("GEMM_BENCH_ROWS").unwrap_or_default();
    let rows: Vec<usize> = rows.split(',').filter_map(|rows| rows.parse().ok()).collect();
    let pool = Spinners::new(threads);
    // Small numbers: as half-precision scales they are finite and not subnormal.
    let mut memory = Vec::with_capacity((STREAM_BYTES + (64 << 20)) / 8);
    advise_huge(memory.spare_capacity_mut());
    memory.resize(memory.capacity(), 0x2c2d_2c2c_2d2c_2c2d_u64);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| pool.work());
        }
        println!("{} threads, {}", threads, Isa::current().name());
        let shapes = [(576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576), (1536, 8960), (8960, 1536)];
        let kinds = [
            (DType::Q4_0, Compute::I8G32),
            (DType::Q4_0, Compute::I8X2G32),
            (DType::Q4_1, Compute::I8G32),
            (DType::Q4_1, Compute::I8G16),
            (DType::Q4_1, Compute::I8X2G32),
            (DType::Q8_0, Compute::I8G32),
            (DType::Q4_K, Compute::I8G32),
            (DType::Q5_K, Compute::I8G32),
            (DType::Q6_K, Compute::I8G32),
            (DType::Q2_K, Compute::I8G32),
            (DType::Q3_K, Compute::I8G32),
            (DType::IQ4_NL, Compute::I8G32),
            (DType::IQ4_XS, Compute::I8G32),
            (DType::Q5_0, Compute::I8G32),
            (DType::Q4_0, Compute::F32),
            (DType::Q4_1, Compute::F32),
            (DType::BF16, Compute::F32),
            (DType::BF16, Compute::Bf16),
            (DType::F16, Compute::F32),
            (DType::F32, Compute::F32),
            (DType::F8E4M3, Compute::F32),
            (DType::F8E5M2, Compute::F32),
        ];
        for (dtype, compute) in kinds {
            let mut probed = false;
            for (n, k) in shapes {
                let label = format!("{dtype} {compute:?} {n}x{k}");
                if !label.contains(&filter)
                    || k % dtype.block_len() != 0
                    || n * k * dtype.block_bytes() / dtype.block_len() > STREAM_BYTES
                {
                    continue;
                }
                if !probed {
                    let products = product_rate(&pool).map_or(String::new(), |rate| format!(", int8 {rate:.0} GOP/s"));
                    println!("machine: reads {:.1} GB/s{products}", read_rate(&pool, &memory));
                    probed = true;
                }
                if !rows.is_empty() {
                    by_rows(&pool, dtype, compute, [n, k], &memory, &rows);
                    continue;
                }
                println!("{label:28} {}", measure(&pool, dtype, compute, n, k, &memory));
            }
        }
        pool.stop.store(true, Ordering::Release);
    });
}
