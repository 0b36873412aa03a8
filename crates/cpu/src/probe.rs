//! What this machine can do at most: how fast memory is read and how fast numbers are multiplied, all threads together.
//!
//! Rates are what a kernel's own loops could reach at best, measured beside it rather than taken from a data sheet: reads
//! stream through more memory than caches hold, multiplications never leave registers. A virtual machine's neighbours change them from
//! second to second, so measure before and after what is to be judged.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64", test))]
use crate::isa::Isa;
#[cfg(any(target_arch = "x86_64", test))]
use crate::isa::has_avx512_bf16;
#[cfg(target_arch = "aarch64")]
use crate::isa::{has_neon_dot, has_neon_i8mm};

/// Kind of multiplication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Multiply {
    /// int8 times int8, summed in int32.
    Int8,
    /// The same by matrix instructions (AMX).
    Int8Matrix,
    /// bfloat16 pairs, summed in float32.
    Bf16,
    /// float32, fused with the addition.
    F32,
}

/// Operations per second of a kind over so many threads, a multiplication and an addition counting as two. `None` where the
/// processor has no instruction for it.
#[must_use]
pub fn multiply_rate(kind: Multiply, threads: usize, time: Duration) -> Option<f64> {
    let block = block_of(kind)?;
    let work = |_: usize| {
        let start = Instant::now();
        let mut operations = 0.0;
        while start.elapsed() < time {
            operations += block.run();
        }
        operations / start.elapsed().as_secs_f64()
    };
    // Vector units of other widths wake up slowly.
    block.run();
    Some(on_threads(threads, &work))
}

/// Memory to stream through.
#[derive(Debug)]
pub struct Stream {
    words: Vec<u64>,
}

/// Bytes that are read between two looks at the clock.
const PIECE: usize = 4 << 20;

impl Stream {
    /// So many bytes, written once, in huge pages where the system has them.
    #[must_use]
    pub fn new(bytes: usize, threads: usize) -> Self {
        let mut words = vec![0_u64; (bytes / 8).max(PIECE / 8)];
        advise_huge(&mut words);
        let part = words.len().div_ceil(threads.max(1));
        std::thread::scope(|scope| {
            for part in words.chunks_mut(part) {
                scope.spawn(move || part.fill(1));
            }
        });
        Self { words }
    }

    /// Bytes per second that so many threads read, each its own part.
    #[must_use]
    pub fn read_rate(&self, threads: usize, time: Duration) -> f64 {
        let part = (self.words.len() / threads.max(1)).max(1);
        let work = |thread: usize| {
            let own = self.words.chunks(part).nth(thread).unwrap_or(&self.words);
            let start = Instant::now();
            let mut bytes = 0_usize;
            'time: loop {
                for piece in own.chunks(PIECE / 8) {
                    black_box(sum(piece));
                    bytes += piece.len() * 8;
                    if start.elapsed() >= time {
                        break 'time;
                    }
                }
            }
            bytes as f64 / start.elapsed().as_secs_f64()
        };
        on_threads(threads, &work)
    }
}

/// The sum of what each of so many threads gives; they start together.
fn on_threads(threads: usize, work: &(dyn Fn(usize) -> f64 + Sync)) -> f64 {
    let threads = threads.max(1);
    let barrier = Barrier::new(threads);
    let run = |thread| {
        barrier.wait();
        work(thread)
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        let own = run(0);
        // A thread that failed has read and multiplied nothing.
        own + others.into_iter().map(|other| other.join().unwrap_or(0.0)).sum::<f64>()
    })
}

fn advise_huge(words: &mut [u64]) {
    #[cfg(target_os = "linux")]
    {
        const HUGE: usize = 2 << 20;
        let start = words.as_mut_ptr() as usize;
        let first = start.next_multiple_of(HUGE);
        let end = (start + size_of_val(words)) / HUGE * HUGE;
        if first < end {
            // SAFETY: the range lies within the slice, and the advice changes no value. It may be refused, which costs speed alone.
            unsafe { libc::madvise(first as *mut libc::c_void, end - first, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = words;
}

/// Sum of words, whatever the overflow: eight streams of additions, so that reads alone are waited for.
#[inline(always)]
fn sum_words(words: &[u64]) -> u64 {
    let mut sums = [0_u64; 64];
    let mut rows = words.chunks_exact(64);
    for row in &mut rows {
        for (sum, word) in sums.iter_mut().zip(row) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(rows.remainder()).fold(0, |a, b| a.wrapping_add(*b))
}

fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    match Isa::current() {
        // SAFETY: the processor has the instructions.
        Isa::Amx => return unsafe { vector::sum_ahead(words) },
        // SAFETY: as above.
        Isa::Avx512 => return unsafe { vector::sum_avx512(words) },
        // SAFETY: as above.
        Isa::Avx2 => return unsafe { vector::sum_avx2(words) },
        Isa::Scalar | Isa::Neon => {}
    }
    sum_words(words)
}

/// A loop of multiplications.
struct Block {
    body: fn(u32) -> u32,
    /// Operations of one turn.
    operations: u32,
}

/// Turns of a loop between two looks at the clock: tens of microseconds.
const TURNS: u32 = 4096;

impl Block {
    fn run(&self) -> f64 {
        black_box((self.body)(black_box(TURNS)));
        f64::from(TURNS) * f64::from(self.operations)
    }
}

fn block_of(kind: Multiply) -> Option<Block> {
    #[cfg(target_arch = "x86_64")]
    match (kind, Isa::current()) {
        (Multiply::Int8, Isa::Avx512 | Isa::Amx) => {
            return Some(Block { body: vector::int8_avx512, operations: 16 * 128 });
        }
        (Multiply::Int8, Isa::Avx2) => return Some(Block { body: vector::int8_avx2, operations: 5 * 64 }),
        // Four products of 16 x 64 by 64 x 16.
        (Multiply::Int8Matrix, Isa::Amx) => {
            return Some(Block { body: vector::int8_amx, operations: 4 * 2 * 16 * 16 * 64 });
        }
        (Multiply::Bf16, _) if has_avx512_bf16() => {
            return Some(Block { body: vector::bf16_avx512, operations: 16 * 64 });
        }
        (Multiply::F32, Isa::Avx512 | Isa::Amx) => {
            return Some(Block { body: vector::f32_avx512, operations: 16 * 32 });
        }
        (Multiply::F32, Isa::Avx2) => return Some(Block { body: vector::f32_avx2, operations: 10 * 16 }),
        _ => {}
    }
    #[cfg(target_arch = "aarch64")]
    match (kind, Isa::current()) {
        (Multiply::Int8, Isa::Neon) if has_neon_i8mm() => {
            return Some(Block { body: vector::int8_matrix, operations: 16 * 64 });
        }
        (Multiply::Int8, Isa::Neon) if has_neon_dot() => {
            return Some(Block { body: vector::int8_dot, operations: 16 * 32 });
        }
        (Multiply::F32, Isa::Neon) => return Some(Block { body: vector::f32_neon, operations: 16 * 8 }),
        _ => {}
    }
    match kind {
        Multiply::Int8 => Some(Block { body: int8_portable, operations: 2 * LANES as u32 }),
        Multiply::F32 => Some(Block { body: f32_portable, operations: 2 * LANES as u32 }),
        Multiply::Int8Matrix | Multiply::Bf16 => None,
    }
}

/// Lanes of the portable loops: what two or more registers of any width hold.
const LANES: usize = 32;

fn int8_portable(turns: u32) -> u32 {
    let (a, b) = (black_box([3_i8; LANES]), black_box([-5_i8; LANES]));
    let mut sums = [0_i32; LANES];
    for turn in 0..turns {
        for ((sum, a), b) in sums.iter_mut().zip(&a).zip(&b) {
            // Depends on the turn, so that the product isn't taken out of the loop.
            *sum = sum.wrapping_add(i32::from(a ^ turn as i8) * i32::from(*b));
        }
    }
    sums.iter().fold(0, |a, b| a ^ b.cast_unsigned())
}

fn f32_portable(turns: u32) -> u32 {
    let (a, b) = (black_box([0.999_f32; LANES]), black_box([1e-3_f32; LANES]));
    let mut sums = [0.5_f32; LANES];
    for _ in 0..turns {
        for ((sum, a), b) in sums.iter_mut().zip(&a).zip(&b) {
            *sum = *sum * a + b;
        }
    }
    sums.iter().fold(0, |a, b| a ^ b.to_bits())
}

#[cfg(target_arch = "x86_64")]
mod vector {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::sum_words;
    use crate::isa::AHEAD;

    /// # Safety
    /// The processor has AVX-512 F, BW, VL and DQ.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn sum_avx512(words: &[u64]) -> u64 {
        sum_words(words)
    }

    /// The same, asking for memory ahead, without which processors with AMX read at half their rate.
    ///
    /// # Safety
    /// As [`sum_avx512`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
    pub(super) unsafe fn sum_ahead(words: &[u64]) -> u64 {
        let mut sums = [0_u64; 64];
        let mut rows = words.chunks_exact(64);
        for row in &mut rows {
            for line in 0..8 {
                _mm_prefetch::<_MM_HINT_T0>(row.as_ptr().cast::<i8>().wrapping_add(AHEAD + 64 * line));
            }
            for (sum, word) in sums.iter_mut().zip(row) {
                *sum = sum.wrapping_add(*word);
            }
        }
        sum_words(&sums).wrapping_add(sum_words(rows.remainder()))
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn sum_avx2(words: &[u64]) -> u64 {
        sum_words(words)
    }

    /// A plain function over a loop with instructions that [`super::block_of`] has asked for.
    macro_rules! looped {
        ($name:ident, $features:literal, |$turns:ident| $body:block) => {
            pub(super) fn $name(turns: u32) -> u32 {
                #[target_feature(enable = $features)]
                unsafe fn run($turns: u32) -> u32 $body
                // SAFETY: only chosen where the processor has these instructions.
                unsafe { run(turns) }
            }
        };
    }

    looped!(int8_avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni", |turns| {
        let (a, b) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(-5)));
        let mut sums = [_mm512_setzero_si512(); 16];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        let all = sums.into_iter().fold(_mm512_setzero_si512(), |x, y| _mm512_xor_si512(x, y));
        _mm512_reduce_add_epi32(all).cast_unsigned()
    });

    /// Shapes of tile registers 0 to 5: 16 rows of 64 bytes.
    #[repr(C, align(64))]
    struct Shapes([u8; 64]);

    /// Products in tile registers: four sums of one pair of factors.
    pub(super) fn int8_amx(turns: u32) -> u32 {
        let mut shapes = Shapes([0; 64]);
        shapes.0[0] = 1;
        for register in 0..6 {
            shapes.0[16 + 2 * register] = 64;
            shapes.0[48 + register] = 16;
        }
        // SAFETY: only chosen where the processor has these instructions and the system lets the process use them; the shapes are
        // valid, and no memory but they is read.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{shapes}]",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "tilezero tmm4",
                "tilezero tmm5",
                "2:",
                "tdpbssd tmm0, tmm4, tmm5",
                "tdpbssd tmm1, tmm4, tmm5",
                "tdpbssd tmm2, tmm4, tmm5",
                "tdpbssd tmm3, tmm4, tmm5",
                "dec {turns:e}",
                "jnz 2b",
                "tilerelease",
                shapes = in(reg) &raw const shapes,
                turns = inout(reg) turns.max(1) => _,
                options(nostack, readonly),
            );
        }
        turns
    }

    looped!(bf16_avx512, "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16", |turns| {
        // 0.01 in bfloat16.
        let value = black_box(_mm512_set1_epi16(0x3c24));
        let mut sums = [_mm512_set1_ps(0.5); 16];
        for _ in 0..turns {
            for sum in &mut sums {
                // SAFETY: both are 512 bits without invalid values.
                let pairs: __m512bh = unsafe { std::mem::transmute(value) };
                *sum = _mm512_dpbf16_ps(*sum, pairs, pairs);
            }
        }
        let all = sums.into_iter().fold(_mm512_setzero_ps(), |x, y| _mm512_add_ps(x, y));
        _mm512_reduce_add_ps(all).to_bits()
    });

    looped!(f32_avx512, "avx512f,avx512bw,avx512vl,avx512dq", |turns| {
        let (a, b) = (black_box(_mm512_set1_ps(0.999)), black_box(_mm512_set1_ps(1e-3)));
        let mut sums = [_mm512_set1_ps(0.5); 16];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        let all = sums.into_iter().fold(_mm512_setzero_ps(), |x, y| _mm512_add_ps(x, y));
        _mm512_reduce_add_ps(all).to_bits()
    });

    // Eight products are added up in 16 bits before they are widened, as the kernels do with codes of four bits. By number, since
    // iterators over arrays of registers are not inlined here.
    looped!(int8_avx2, "avx2", |turns| {
        const COUNT: usize = 5;
        let (mut a, b, ones) =
            (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(-5)), black_box(_mm256_set1_epi16(1)));
        let mut factors = [b; COUNT];
        for (i, factor) in factors.iter_mut().enumerate() {
            *factor = black_box(_mm256_xor_si256(b, _mm256_set1_epi8(i as i8)));
        }
        let mut sums = [_mm256_setzero_si256(); COUNT];
        let mut parts = sums;
        for turn in 0..turns {
            // Changes each turn, so that the products aren't taken out of the loop.
            a = _mm256_xor_si256(a, ones);
            for i in 0..COUNT {
                parts[i] = _mm256_add_epi16(parts[i], _mm256_maddubs_epi16(a, factors[i]));
            }
            if turn % 8 == 7 {
                for i in 0..COUNT {
                    sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(parts[i], ones));
                    parts[i] = _mm256_setzero_si256();
                }
            }
        }
        let mut all = sums[0];
        for i in 1..COUNT {
            all = _mm256_xor_si256(all, _mm256_xor_si256(sums[i], parts[i]));
        }
        _mm256_extract_epi32::<0>(all).cast_unsigned()
    });

    looped!(f32_avx2, "avx2,fma", |turns| {
        let (a, b) = (black_box(_mm256_set1_ps(0.999)), black_box(_mm256_set1_ps(1e-3)));
        let mut sums = [_mm256_set1_ps(0.5); 10];
        for _ in 0..turns {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        let all = sums.into_iter().fold(_mm256_setzero_ps(), |x, y| _mm256_add_ps(x, y));
        _mm256_cvtss_f32(all).to_bits()
    });
}

/// UNTESTED on hardware: whether 16 sums keep a processor's pipes full is not known.
#[cfg(target_arch = "aarch64")]
mod vector {
    use std::arch::aarch64::*;
    use std::arch::asm;
    use std::hint::black_box;

    /// A loop of one instruction on int8, which has no stable intrinsic.
    macro_rules! int8 {
        ($name:ident, $extension:literal, $instruction:literal) => {
            pub(super) fn $name(turns: u32) -> u32 {
                // SAFETY: only chosen where the processor has the instruction; registers alone are touched.
                unsafe {
                    let (a, b) = (black_box(vdupq_n_s8(3)), black_box(vdupq_n_s8(-5)));
                    let mut sums = [vdupq_n_s32(0); 16];
                    for _ in 0..turns {
                        for sum in &mut sums {
                            asm!(
                                concat!(".arch_extension ", $extension),
                                concat!($instruction, " {sum:v}.4s, {a:v}.16b, {b:v}.16b"),
                                sum = inlateout(vreg) *sum,
                                a = in(vreg) a,
                                b = in(vreg) b,
                                options(nomem, nostack, preserves_flags)
                            );
                        }
                    }
                    let all = sums.into_iter().fold(vdupq_n_s32(0), |x, y| veorq_s32(x, y));
                    vaddvq_s32(all).cast_unsigned()
                }
            }
        };
    }
    int8!(int8_dot, "dotprod", "sdot");
    int8!(int8_matrix, "i8mm", "smmla");

    pub(super) fn f32_neon(turns: u32) -> u32 {
        // SAFETY: part of the architecture.
        unsafe {
            let (a, b) = (black_box(vdupq_n_f32(0.999)), black_box(vdupq_n_f32(1e-3)));
            let mut sums: [_; 16] = std::array::from_fn(|i| vdupq_n_f32(i as f32));
            for _ in 0..turns {
                for sum in &mut sums {
                    *sum = vfmaq_f32(b, *sum, a);
                }
            }
            let all = sums.into_iter().fold(vdupq_n_f32(0.0), |x, y| vaddq_f32(x, y));
            vaddvq_f32(all).to_bits()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_positive() {
        let time = Duration::from_millis(2);
        for threads in [1, 3] {
            let stream = Stream::new(8 << 20, threads);
            assert!(stream.read_rate(threads, time) > 0.0);
            for kind in [Multiply::Int8, Multiply::F32] {
                assert!(multiply_rate(kind, threads, time).unwrap() > 0.0);
            }
            assert_eq!(multiply_rate(Multiply::Bf16, threads, time).is_some(), has_avx512_bf16());
            let matrix = multiply_rate(Multiply::Int8Matrix, threads, time);
            assert_eq!(matrix.is_some_and(|rate| rate > 0.0), Isa::current() == Isa::Amx);
        }
    }

    #[test]
    fn sums_are_sums() {
        let words: Vec<u64> = (0..1003).collect();
        assert_eq!(sum(&words), words.iter().sum::<u64>());
        assert_eq!(sum_words(&words), words.iter().sum::<u64>());
    }
}
