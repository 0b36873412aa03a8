//! NEON twins: integer products in pieces of four rows (one row of activations) or eight (several). UNTESTED on hardware: bits
//! are proven under emulation, speed is not known.
//!
//! Weight codes are made signed. By what the processor has:
//! - `smmla` (i8mm): 2 rows of activations x 2 of weights over 8 inputs. Weights of two runs are interleaved once for all rows
//!   of a tile, sums come out two by two and are put apart at the end of a group;
//! - `sdot` (dotprod): 4 rows x 4 inputs, activations from a lane of a register of four runs;
//! - neither: `smull`, then pairwise sums of neighbours twice.
//!
//! The intrinsics of the first two are not stable, so they are assembly; each instruction alone, so that the compiler
//! schedules them.

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use qwen_formats::DType;

use super::activations::Format;
use super::form::PANEL;
use super::vector::Vector;
use super::wide::{Panels, RUNS, Stretches, WideGroup};
use crate::isa::{has_neon_dot, has_neon_i8mm};

/// How four inputs of four rows are multiplied.
trait Dot: Copy {
    /// `sum` plus the products of a run with lane `LANE` of `x`.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn dot<const LANE: i32>(sum: int32x4_t, codes: int8x16_t, x: int8x16_t) -> int32x4_t;
}

#[derive(Clone, Copy)]
struct Sdot;

impl Dot for Sdot {
    #[inline(always)]
    unsafe fn dot<const LANE: i32>(mut sum: int32x4_t, codes: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's promise; registers alone are touched.
        unsafe {
            asm!(
                ".arch_extension dotprod",
                "sdot {sum:v}.4s, {codes:v}.16b, {x:v}.4b[{lane}]",
                sum = inlateout(vreg) sum,
                codes = in(vreg) codes,
                x = in(vreg) x,
                lane = const LANE,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    }
}

#[derive(Clone, Copy)]
struct Smull;

impl Dot for Smull {
    #[inline(always)]
    unsafe fn dot<const LANE: i32>(sum: int32x4_t, codes: int8x16_t, x: int8x16_t) -> int32x4_t {
        // SAFETY: part of the architecture.
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(vreinterpretq_s32_s8(x)));
            let low = vpaddlq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(x)));
            let high = vpaddlq_s16(vmull_high_s8(codes, x));
            vaddq_s32(sum, vpaddq_s32(low, high))
        }
    }
}

/// `sum` plus 2 x 8 activations times 2 x 8 weights, by row of activations, then of weights.
///
/// # Safety
/// The processor has i8mm.
#[inline(always)]
unsafe fn smmla(mut sum: int32x4_t, x: int8x16_t, codes: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's promise; registers alone are touched.
    unsafe {
        asm!(
            ".arch_extension i8mm",
            "smmla {sum:v}.4s, {x:v}.16b, {codes:v}.16b",
            sum = inlateout(vreg) sum,
            x = in(vreg) x,
            codes = in(vreg) codes,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Products of `COUNT` runs, 4 or 8, with their words at `x`.
///
/// # Safety
/// The processor has the instructions; `COUNT` readable words.
#[inline(always)]
unsafe fn dot_runs<D: Dot, const COUNT: usize>(
    mut sum: int32x4_t,
    codes: [int8x16_t; COUNT],
    x: *const i32,
) -> int32x4_t {
    for first in (0..COUNT).step_by(4) {
        // SAFETY: the caller's promise.
        unsafe {
            let x = vreinterpretq_s8_s32(vld1q_s32(x.add(first)));
            sum = D::dot::<0>(sum, codes[first], x);
            sum = D::dot::<1>(sum, codes[first + 1], x);
            sum = D::dot::<2>(sum, codes[first + 2], x);
            sum = D::dot::<3>(sum, codes[first + 3], x);
        }
    }
    sum
}

/// Adds a stretch of a panel, its codes unpacked as signed bytes, times a tile of `width` rows to `acc`.
pub(super) fn multiply(
    format: Format,
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    let runs = RUNS / format.subs;
    let sub_words = width * (runs + 3);
    assert!(words.len() >= wide.len() * format.subs * sub_words && acc.len() >= width * PANEL);
    macro_rules! call {
        ($tile:ident $(, $dot:ty)?) => {
            match format.subs {
                1 => $tile::<$($dot,)? 1, 8>(halves, has_min, width, wide, words, acc),
                _ => $tile::<$($dot,)? 2, 4>(halves, has_min, width, wide, words, acc),
            }
        };
    }
    // SAFETY: the assertion covers all that is read and written; the instructions are asked for.
    unsafe {
        if width.is_multiple_of(2) && has_neon_i8mm() {
            call!(paired_tile);
        } else if has_neon_dot() {
            call!(tile, Sdot);
        } else {
            call!(tile, Smull);
        }
    }
}

/// Where a row of a tile finds its factors, and where it adds.
struct Slot {
    scale: f32,
    sum: f32,
    y: *mut f32,
}

impl Slot {
    /// # Safety
    /// `meta` is that of a tile of `width` rows over `t`, and `acc` its first accumulator.
    #[inline(always)]
    unsafe fn of(meta: *const i32, acc: *mut f32, width: usize, t: usize) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            Self { scale: *meta.add(t).cast::<f32>(), sum: *meta.add(width + t).cast::<f32>(), y: acc.add(t * PANEL) }
        }
    }

    /// Adds four sums from accumulator `row` on.
    ///
    /// # Safety
    /// Four accumulators there.
    #[inline(always)]
    unsafe fn add(&self, row: usize, sums: int32x4_t, scale: float32x4_t, min: float32x4_t, has_min: bool) {
        // SAFETY: the caller's promise.
        unsafe {
            let y = self.y.add(row);
            let scale = vmulq_f32(scale, vdupq_n_f32(self.scale));
            let mut sum = vfmaq_f32(vld1q_f32(y), scale, vcvtq_f32_s32(sums));
            if has_min {
                sum = vfmaq_f32(sum, min, vdupq_n_f32(self.sum));
            }
            vst1q_f32(y, sum);
        }
    }
}

/// Eight rows of a subgroup of weights.
struct Piece<const RUN: usize> {
    codes: [[int8x16_t; RUN]; 2],
    scale: [float32x4_t; 2],
    min: [float32x4_t; 2],
}

impl<const RUN: usize> Piece<RUN> {
    /// Rows `row` to `row + 8`.
    #[inline(always)]
    fn load(group: &WideGroup, sub: usize, half: usize, row: usize) -> Self {
        let mut codes = [[vzero(); RUN]; 2];
        // SAFETY: rows and runs are within the group.
        unsafe {
            for (part, codes) in codes.iter_mut().enumerate() {
                for (run, codes) in codes.iter_mut().enumerate() {
                    *codes = vld1q_s8(group.codes[sub * RUN + run].as_ptr().add(row + 4 * part).cast());
                }
            }
            let (scale, min) = (group.scale[half].as_ptr().add(row), group.min[half].as_ptr().add(row));
            Self {
                codes,
                scale: [vld1q_f32(scale), vld1q_f32(scale.add(4))],
                min: [vld1q_f32(min), vld1q_f32(min.add(4))],
            }
        }
    }
}

#[inline(always)]
fn vzero() -> int8x16_t {
    // SAFETY: part of the architecture.
    unsafe { vdupq_n_s8(0) }
}

/// # Safety
/// The processor has the instructions of `D`; lengths fit each other.
#[inline]
unsafe fn tile<D: Dot, const SUBS: usize, const RUN: usize>(
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    let acc = acc.as_mut_ptr();
    for row in [0, 8] {
        let mut at = words.as_ptr().cast::<i32>();
        for group in wide {
            for sub in 0..SUBS {
                let piece = Piece::<RUN>::load(group, sub, if halves == 2 { sub } else { 0 }, row);
                // SAFETY: the caller's promise.
                unsafe {
                    let meta = at.add(width * RUN);
                    for t in 0..width {
                        let slot = Slot::of(meta, acc, width, t);
                        let mut sums = [vdupq_n_s32(0); 2];
                        for (sum, codes) in sums.iter_mut().zip(piece.codes) {
                            *sum = dot_runs::<D, RUN>(*sum, codes, at.add(t * RUN));
                        }
                        for (part, sum) in sums.into_iter().enumerate() {
                            slot.add(row + 4 * part, sum, piece.scale[part], piece.min[part], has_min);
                        }
                    }
                    at = at.add(width * (RUN + 3));
                }
            }
        }
    }
}

/// The first or the second halves of two registers.
#[inline(always)]
unsafe fn halves_of<const SECOND: bool>(a: int32x4_t, b: int32x4_t) -> int32x4_t {
    // SAFETY: part of the architecture.
    unsafe {
        let (a, b) = (vreinterpretq_s64_s32(a), vreinterpretq_s64_s32(b));
        vreinterpretq_s32_s64(if SECOND { vzip2q_s64(a, b) } else { vzip1q_s64(a, b) })
    }
}

/// [`tile`] for an even number of rows, two at a time.
///
/// # Safety
/// The processor has i8mm; lengths fit each other.
#[inline]
unsafe fn paired_tile<const SUBS: usize, const RUN: usize>(
    halves: usize,
    has_min: bool,
    width: usize,
    wide: &[WideGroup],
    words: &[u32],
    acc: &mut [f32],
) {
    let acc = acc.as_mut_ptr();
    for row in [0, 8] {
        let mut at = words.as_ptr().cast::<i32>();
        for group in wide {
            for sub in 0..SUBS {
                let mut piece = Piece::<RUN>::load(group, sub, if halves == 2 { sub } else { 0 }, row);
                // SAFETY: the caller's promise.
                unsafe {
                    // Runs 2 i and 2 i + 1 become 8 inputs of rows 0 and 1, and of rows 2 and 3.
                    for codes in &mut piece.codes {
                        for pair in codes.as_chunks_mut::<2>().0 {
                            let (a, b) = (vreinterpretq_s32_s8(pair[0]), vreinterpretq_s32_s8(pair[1]));
                            *pair = [vzip1q_s32(a, b), vzip2q_s32(a, b)].map(|codes| vreinterpretq_s8_s32(codes));
                        }
                    }
                    let meta = at.add(width * RUN);
                    for t in (0..width).step_by(2) {
                        let slots = [Slot::of(meta, acc, width, t), Slot::of(meta, acc, width, t + 1)];
                        let mut sums = [[vdupq_n_s32(0); 2]; 2];
                        let (x0, x1) = (at.add(t * RUN), at.add((t + 1) * RUN));
                        for first in (0..RUN).step_by(4) {
                            let (x0, x1) = (vld1q_s32(x0.add(first)), vld1q_s32(x1.add(first)));
                            let x = [halves_of::<false>(x0, x1), halves_of::<true>(x0, x1)];
                            for (i, x) in x.into_iter().enumerate() {
                                let (x, run) = (vreinterpretq_s8_s32(x), first + 2 * i);
                                for (sums, codes) in sums.iter_mut().zip(&piece.codes) {
                                    sums[0] = smmla(sums[0], x, codes[run]);
                                    sums[1] = smmla(sums[1], x, codes[run + 1]);
                                }
                            }
                        }
                        for (part, sums) in sums.into_iter().enumerate() {
                            let (scale, min) = (piece.scale[part], piece.min[part]);
                            let sums = [halves_of::<false>(sums[0], sums[1]), halves_of::<true>(sums[0], sums[1])];
                            for (slot, sums) in slots.iter().zip(sums) {
                                slot.add(row + 4 * part, sums, scale, min, has_min);
                            }
                        }
                    }
                    at = at.add(width * (RUN + 3));
                }
            }
        }
    }
}

/// Unpacks whole packed blocks of a type, codes as signed bytes.
pub(super) fn unpack(dtype: DType, packed: &[u8], wide: &mut [WideGroup]) {
    // SAFETY: unpacking needs no more than the architecture has.
    unsafe { by_smull::unpack::<0>(dtype, packed, wide) };
}

/// Panels of a type times one row.
///
/// # Safety
/// `words` are tiles of one row over a panel's inputs, the second empty if there is no second term.
pub(super) unsafe fn gemv(dtype: DType, format: Format, panels: Panels<'_>, words: [&[u32]; 2], acc: &mut [f32]) {
    // SAFETY: the caller's promise; the instructions are asked for.
    unsafe {
        if has_neon_dot() {
            by_sdot::gemv::<0>(dtype, format, panels, words, acc);
        } else {
            by_smull::gemv::<0>(dtype, format, panels, words, acc);
        }
    }
}

/// Adds the products of stretches of panels of a type with a tile of `width` rows to `acc`.
///
/// # Safety
/// Stretches are whole packed blocks.
pub(super) unsafe fn few_rows(
    dtype: DType,
    format: Format,
    stretches: Stretches<'_>,
    width: usize,
    words: &[u32],
    acc: &mut [f32],
) {
    // SAFETY: the caller's promise; the instructions are asked for.
    unsafe {
        if has_neon_dot() {
            by_sdot::few_rows(dtype, format, stretches, width, words, acc);
        } else {
            by_smull::few_rows(dtype, format, stretches, width, words, acc);
        }
    }
}

/// Adds the products of a packed panel with a tile of f32 values to `acc`.
pub(super) fn exact(dtype: DType, panel: &[u8], width: usize, words: &[f32], acc: &mut [f32]) {
    // SAFETY: every processor of this architecture has the instructions.
    unsafe { by_smull::exact(dtype, panel, width, words, acc) }
}

/// Products of one row and of a few with dot products.
mod by_sdot {
    use super::super::few::few_rows_entry;
    use super::super::sources::gemv_entry;
    use super::{DType, Format, Rows4, Sdot};

    few_rows_entry!(Rows4<Sdot>, "neon,dotprod");
    gemv_entry!(Rows4<Sdot>, "neon,dotprod");
}

/// The same without, and unpacking.
mod by_smull {
    use super::super::exact::exact_entry;
    use super::super::few::few_rows_entry;
    use super::super::sources::{gemv_entry, unpack_entry};
    use super::{DType, Format, Rows4, Smull, WideGroup};

    unpack_entry!(Rows4<Smull>, "neon");
    few_rows_entry!(Rows4<Smull>, "neon");
    gemv_entry!(Rows4<Smull>, "neon");
    exact_entry!(Rows4<Smull>, "neon");
}

/// Four rows.
#[derive(Clone, Copy)]
struct Rows4<D>(uint32x4_t, PhantomData<D>);

impl<D> Rows4<D> {
    #[inline(always)]
    const fn of(x: uint32x4_t) -> Self {
        Self(x, PhantomData)
    }
}

/// A method's body. SAFETY: the trait's callers have the instructions and valid pointers.
macro_rules! vector {
    ($($body:tt)*) => {
        // SAFETY: as said.
        unsafe { $($body)* }
    };
}

impl<D: Dot> Vector for Rows4<D> {
    type Float = float32x4_t;
    const ROWS: usize = 4;

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        vector!(asm!("prfm pldl1keep, [{}]", in(reg) p, options(readonly, nostack, preserves_flags)));
    }
    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self {
        vector!(Self::of(vreinterpretq_u32_u8(vld1q_u8(p))))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut u8) {
        vector!(vst1q_u8(p, vreinterpretq_u8_u32(self.0)));
    }
    #[inline(always)]
    unsafe fn splat8(x: u8) -> Self {
        vector!(Self::of(vreinterpretq_u32_u8(vdupq_n_u8(x))))
    }
    #[inline(always)]
    unsafe fn splat32(x: i32) -> Self {
        vector!(Self::of(vdupq_n_u32(x.cast_unsigned())))
    }
    #[inline(always)]
    unsafe fn and(self, other: Self) -> Self {
        vector!(Self::of(vandq_u32(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        vector!(Self::of(vorrq_u32(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn add8(self, other: Self) -> Self {
        vector! {
            let (a, b) = (vreinterpretq_u8_u32(self.0), vreinterpretq_u8_u32(other.0));
            Self::of(vreinterpretq_u32_u8(vaddq_u8(a, b)))
        }
    }
    #[inline(always)]
    unsafe fn add32(self, other: Self) -> Self {
        vector!(Self::of(vaddq_u32(self.0, other.0)))
    }
    #[inline(always)]
    unsafe fn up16<const N: u32>(self) -> Self {
        vector!(Self::of(vreinterpretq_u32_u16(vshlq_u16(vreinterpretq_u16_u32(self.0), vdupq_n_s16(N as i16)))))
    }
    #[inline(always)]
    unsafe fn down16<const N: u32>(self) -> Self {
        vector!(Self::of(vreinterpretq_u32_u16(vshlq_u16(vreinterpretq_u16_u32(self.0), vdupq_n_s16(-(N as i16))))))
    }
    #[inline(always)]
    unsafe fn up32<const N: u32>(self) -> Self {
        vector!(Self::of(vshlq_u32(self.0, vdupq_n_s32(N as i32))))
    }
    #[inline(always)]
    unsafe fn down32(self, count: usize) -> Self {
        vector!(Self::of(vshlq_u32(self.0, vdupq_n_s32(-(count as i32)))))
    }
    #[inline(always)]
    unsafe fn lookup(self, table: &[u8; 16]) -> Self {
        vector!(Self::of(vreinterpretq_u32_u8(vqtbl1q_u8(vld1q_u8(table.as_ptr()), vreinterpretq_u8_u32(self.0)))))
    }
    #[inline(always)]
    unsafe fn bytes(p: *const u8) -> Self {
        vector! {
            let four = vcreate_u8(u64::from(p.cast::<u32>().read_unaligned()));
            Self::of(vmovl_u16(vget_low_u16(vmovl_u8(four))))
        }
    }
    #[inline(always)]
    unsafe fn signed_bytes(p: *const u8) -> Self {
        vector! {
            let four = vcreate_s8(u64::from(p.cast::<u32>().read_unaligned()));
            Self::of(vreinterpretq_u32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four)))))
        }
    }
    #[inline(always)]
    unsafe fn halves(p: *const u8) -> Self {
        vector!(Self::of(vmovl_u16(vld1_u16(p.cast()))))
    }
    #[inline(always)]
    unsafe fn signed_bytes_to_floats(self) -> [float32x4_t; 4] {
        vector! {
            let all = vreinterpretq_s32_u32(self.0);
            let first = vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<24>(all)));
            let second = vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<16>(all)));
            let third = vcvtq_f32_s32(vshrq_n_s32::<24>(vshlq_n_s32::<8>(all)));
            [first, second, third, vcvtq_f32_s32(vshrq_n_s32::<24>(all))]
        }
    }
    #[inline(always)]
    unsafe fn half(p: *const u8) -> float32x4_t {
        vector!(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.cast()))))
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        vector!(vdupq_n_f32(x))
    }
    #[inline(always)]
    unsafe fn load_float(p: *const f32) -> float32x4_t {
        vector!(vld1q_f32(p))
    }
    #[inline(always)]
    unsafe fn store_float(x: float32x4_t, p: *mut f32) {
        vector!(vst1q_f32(p, x));
    }
    #[inline(always)]
    unsafe fn to_float(self) -> float32x4_t {
        vector!(vcvtq_f32_s32(vreinterpretq_s32_u32(self.0)))
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vector!(vmulq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vector!(vaddq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vector!(vsubq_f32(a, b))
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vector!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    unsafe fn begin<const OFFSET: u8>(offset: *const i32) -> Self {
        // SAFETY: as said; the stored number is a multiple of 128. Codes with offset 128 are made signed instead.
        unsafe { Self::splat32(if OFFSET == 128 { 0 } else { *offset >> (7 - OFFSET.trailing_zeros()) }) }
    }
    #[inline(always)]
    unsafe fn dot<const OFFSET: u8, const COUNT: usize>(sum: Self, codes: [Self; COUNT], x: *const i32) -> Self {
        vector! {
            // Codes plus 8 are below 16 and mean the same as signed bytes.
            let mut signed = [vzero(); COUNT];
            for (signed, codes) in signed.iter_mut().zip(codes) {
                let codes = vreinterpretq_u8_u32(codes.0);
                *signed = vreinterpretq_s8_u8(if OFFSET == 128 { veorq_u8(codes, vdupq_n_u8(0x80)) } else { codes });
            }
            Self::of(vreinterpretq_u32_s32(dot_runs::<D, COUNT>(vreinterpretq_s32_u32(sum.0), signed, x)))
        }
    }
}
