//! AMX: integer products of a tile of rows, for many tokens at a time.
//!
//! One instruction multiplies up to 16 rows of activations (32 int8 inputs each) with a group of a panel
//! (8 runs of [16 outputs][4 inputs], as [`WideGroup`] holds them) and leaves the 16 x 16 integer sums in a tile register. Both
//! operands are read where they lie. The sums go through some KiB of stack into vector registers, where scales are applied exactly
//! as in the other variants: integer sums are exact in any order, so results are the same bits.
//!
//! Weight codes are signed here ([`super::avx512::unpack`] with the target 0): there is no offset to take away again.
//!
//! Per 16 tokens and group: 16 cycles of the multiplier, 16 stores, 16 x 3 vector operations. Bound by the way of the sums
//! through memory and by the vector operations, which overlap with the multiplier's because the next group's products are begun
//! before a group's sums are used.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::activations::{Format, padded_rows};
use super::avx512::tile_of;
use super::unroll::unroll;
use super::wide::{Ask, RUNS, Tiles, WideGroup};

/// Rows of a tile register.
const TILE_ROWS: usize = 16;

/// Whether the way through tile registers is the faster one for a block of so many rows. A tile costs the same whatever its rows are,
/// so the last one should be full unless there are others; where sums of 16 inputs have their own scales, twice as many go
/// through memory, and vector registers win at any size.
pub(super) const fn pays(rows: usize, subgroups: usize) -> bool {
    subgroups == 1 && (rows >= 2 * TILE_ROWS || padded_rows(rows).is_multiple_of(TILE_ROWS))
}

/// The tile registers of this thread, shaped; free again when dropped.
pub(super) struct Registers {
    shape: (u8, u8),
}

#[repr(C, align(64))]
struct Shapes([u8; 64]);

impl Registers {
    /// Registers without a shape.
    pub(super) const fn new() -> Self {
        Self { shape: (0, 0) }
    }

    /// Shapes register 0 as sums, 1 as `rows` rows of activations, 2 as weights of `runs` runs.
    ///
    /// # Safety
    /// The processor has AMX and the process may use it; `rows` is 1 to 16, `runs` 1 to 16.
    unsafe fn shape(&mut self, rows: u8, runs: u8) {
        if self.shape == (rows, runs) {
            return;
        }
        let mut shapes = Shapes([0; 64]);
        shapes.0[0] = 1;
        for (register, (columns, rows)) in [(64, rows), (4 * runs, rows), (64, runs)].into_iter().enumerate() {
            shapes.0[16 + 2 * register] = columns;
            shapes.0[48 + register] = rows;
        }
        // SAFETY: reads the 64 bytes of a valid configuration.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
        self.shape = (rows, runs);
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        if self.shape != (0, 0) {
            // SAFETY: registers were shaped, so the instruction is there.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
}

/// Sums of rows at `$a` (`$stride` bytes apart) with the weights at `$b`, stored at `$c`, by the registers named.
macro_rules! product {
    ($sums:literal, $x:literal, $weights:literal, $a:expr, $stride:expr, $b:expr, $c:expr) => {
        asm!(
            concat!("tilezero tmm", $sums),
            concat!("tileloadd tmm", $x, ", [{a} + {stride} * 1]"),
            concat!("tileloadd tmm", $weights, ", [{b} + {line} * 1]"),
            concat!("tdpbssd tmm", $sums, ", tmm", $x, ", tmm", $weights),
            concat!("tilestored [{c} + {line} * 1], tmm", $sums),
            a = in(reg) $a,
            b = in(reg) $b,
            c = in(reg) $c,
            stride = in(reg) $stride,
            line = in(reg) 64_usize,
            options(nostack),
        )
    };
}

/// Buffers of sums: of the products that are begun and of those whose sums are used.
const BUFFERS: usize = 2;

/// Sums of a step.
#[repr(C, align(64))]
struct Sums([[i32; 16]; TILE_ROWS]);

/// Adds a stretch of a panel times tiles of `W` rows; the AMX twin of [`super::scalar::tile`], for signed codes. The next
/// product is begun before a product's sums are used, also from tile to tile.
///
/// # Safety
/// The processor has AVX-512 F, BW, VL, DQ and AMX int8, which the process may use. Every tile's words are `wide.len()` groups
/// of `W` rows.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn tile<const HALVES: usize, const SUBS: usize, const MIN: bool, const W: usize>(
    registers: &mut Registers,
    wide: &[WideGroup],
    tiles: Tiles<'_>,
    ask: Ask,
    acc: &mut [f32],
) {
    let runs = RUNS / SUBS;
    let sub_words = W * (runs + 3);
    let steps = wide.len() * SUBS;
    let Some(last) = tiles.count.checked_sub(1) else { return };
    assert!(tiles.words.len() >= last * tiles.stride + steps * sub_words && acc.len() >= tiles.count * W * 16);
    let acc = acc.as_mut_ptr();
    let mut sums = [const { MaybeUninit::<Sums>::uninit() }; BUFFERS];
    // SAFETY: the assertion covers all that is read and written below; instructions by the caller's promise.
    unsafe {
        registers.shape(W as u8, runs as u8);
        let products = |tile: usize, step: usize, sums: *mut Sums| {
            let weights = wide.as_ptr().add(step / SUBS).cast::<u8>().add(step % SUBS * runs * 64);
            let x = tiles.words.as_ptr().add(tile * tiles.stride + step * sub_words).cast::<u8>();
            product!("0", "1", "2", x, runs * 4, weights, sums);
        };
        let base = sums.as_mut_ptr().cast::<Sums>();
        let mut buffer = 0;
        if steps > 0 {
            products(0, 0, base);
        }
        for tile in 0..tiles.count {
            let ask = if tile == 0 { ask } else { Ask::NOTHING };
            let acc = acc.add(tile * W * 16);
            let words = tiles.words.as_ptr().add(tile * tiles.stride);
            let mut y = [_mm512_setzero_ps(); W];
            for (t, y) in y.iter_mut().enumerate() {
                *y = _mm512_loadu_ps(acc.add(16 * t));
            }
            for step in 0..steps {
                if step % SUBS == 0 {
                    ask.group(step / SUBS);
                }
                let begun = base.add(buffer).cast::<i32>();
                buffer = (buffer + 1) % BUFFERS;
                if step + 1 < steps {
                    products(tile, step + 1, base.add(buffer));
                } else if tile < last {
                    products(tile + 1, 0, base.add(buffer));
                }
                let group = &wide[step / SUBS];
                let half = if HALVES == 2 { step % SUBS } else { 0 };
                let scale = _mm512_load_ps(group.scale[half].as_ptr());
                let min = _mm512_load_ps(group.min[half].as_ptr());
                let meta = words.add(step * sub_words + W * runs).cast::<f32>();
                unroll!(t < W, {
                    let sum = _mm512_load_si512(begun.add(16 * t).cast());
                    let scale = _mm512_mul_ps(scale, _mm512_set1_ps(*meta.add(t)));
                    y[t] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(sum), y[t]);
                    if MIN {
                        y[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(*meta.add(W + t)), y[t]);
                    }
                });
            }
            for (t, y) in y.into_iter().enumerate() {
                _mm512_storeu_ps(acc.add(16 * t), y);
            }
        }
    }
}

/// Adds a stretch of a panel, codes signed, times tiles to `acc`.
///
/// # Safety
/// As [`tile`].
pub(super) unsafe fn multiply(
    registers: &mut Registers,
    format: Format,
    (halves, has_min): (usize, bool),
    wide: &[WideGroup],
    tiles: Tiles<'_>,
    ask: Ask,
    acc: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe { tile_of!(tile, format, halves, has_min, tiles.width, (registers, wide, tiles, ask, acc)) }
}
