//! One row of activations times 8-bit floats, straight from the file's bytes.
//!
//! Shape: a row of `k` weights, a byte each, with a scale for every so many columns, times `k` f32 activations. The bits are those of
//! widening the row ([`super::widen`]) and multiplying it ([`super::float`]): each weight times its scale, rounded, and lane `j` of
//! sixteen sums adds inputs `j`, `j + 16`, ... in order by fused multiply-adds. So a row of activations gets the same bits alone as
//! among others, which are multiplied with panels that were widened once for all.
//!
//! Bound: reading weights, or the sums, of which each multiply-add waits for the one before: 16 weights in 4 cycles. Two rows at a time
//! would wait for less, but read two streams, which memory gives at half the rate. With table look-ups (AVX-512 VBMI) widening takes
//! 11 operations of 512 bits for 64 weights, by way of half precision 24 (AVX-512) and 48 of 256 (AVX2); scales and products take 8.

#![expect(clippy::needless_range_loop, reason = "registers by number: an iterator would move them through memory")]

use std::marker::PhantomData;

use qwen_formats::DType;

use super::widen::Scales;
use crate::isa::Isa;
use crate::kernels::simd::{Kernel, LANES, Simd, dispatch};

/// Weights of a row that are widened at a time.
const STEP: usize = 4 * LANES;

/// A row of weights and what it meets.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    /// As many bytes as there are inputs.
    pub(super) weights: &'a [u8],
    pub(super) scales: Scales<'a>,
    /// The row of activations.
    pub(super) inputs: &'a [f32],
}

/// Whether rows of `k` weights of a type, with a scale for every `columns`, are multiplied here.
pub(super) const fn takes(dtype: DType, k: usize, columns: usize) -> bool {
    matches!(dtype, DType::F8E4M3 | DType::F8E5M2)
        && k.is_multiple_of(LANES)
        && columns > 0
        && (columns >= k || columns.is_multiple_of(LANES))
}

/// The sum of the products. What is multiplied here is what [`takes`] says.
pub(super) fn multiply(isa: Isa, dtype: DType, row: Row<'_>) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if isa >= Isa::Avx512 && crate::isa::has_avx512_vbmi() {
        // SAFETY: the instructions are there.
        return unsafe { avx512::run(dtype, row) };
    }
    match dtype {
        DType::F8E5M2 => dispatch(isa, ByHalves::<false>(row)),
        _ => dispatch(isa, ByHalves::<true>(row)),
    }
}

struct ByHalves<'a, const E4M3: bool>(Row<'a>);

impl<const E4M3: bool> Kernel for ByHalves<'_, E4M3> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        self.0.sum(Halves::<S, E4M3>(s, PhantomData))
    }
}

/// How bytes become f32.
trait Widen: Copy {
    type Simd: Simd;
    fn simd(self) -> Self::Simd;
    /// # Safety
    /// [`LANES`] readable bytes at `p`.
    unsafe fn one(self, p: *const u8) -> Vector<Self>;
    /// # Safety
    /// [`STEP`] readable bytes at `p`.
    unsafe fn four(self, p: *const u8) -> [Vector<Self>; 4];
}

type Vector<W> = <<W as Widen>::Simd as Simd>::V;

/// By the instruction set's own conversion, which goes by way of half precision.
#[derive(Clone, Copy)]
struct Halves<S, const E4M3: bool>(S, PhantomData<()>);

impl<S: Simd, const E4M3: bool> Widen for Halves<S, E4M3> {
    type Simd = S;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    unsafe fn one(self, p: *const u8) -> S::V {
        // SAFETY: the caller's promise, here and below.
        unsafe { if E4M3 { self.0.load_e4m3(p) } else { self.0.load_e5m2(p) } }
    }
    #[inline(always)]
    unsafe fn four(self, p: *const u8) -> [S::V; 4] {
        // SAFETY: as above.
        unsafe { [self.one(p), self.one(p.add(LANES)), self.one(p.add(2 * LANES)), self.one(p.add(3 * LANES))] }
    }
}

impl Row<'_> {
    #[inline(always)]
    fn sum<W: Widen>(self, w: W) -> f32 {
        let (s, k, Scales { values: scales, columns }) = (w.simd(), self.inputs.len(), self.scales);
        assert!(k.is_multiple_of(LANES) && (columns >= k || columns.is_multiple_of(LANES)) && columns > 0);
        assert!(self.weights.len() == k && scales.len() >= k.div_ceil(columns));
        let (weights, inputs) = (self.weights.as_ptr(), self.inputs.as_ptr());
        let mut sums = s.splat(0.0);
        let mut at: usize = 0;
        for scale in &scales[..k.div_ceil(columns)] {
            let end = k.min(at.saturating_add(columns));
            let scale = s.splat(*scale);
            // SAFETY: `end` is at most `k`, and whole steps and lanes fit before it.
            unsafe {
                while at + STEP <= end {
                    let values = w.four(weights.add(at));
                    for i in 0..4 {
                        sums = s.fma(s.mul(values[i], scale), s.load(inputs.add(at + i * LANES)), sums);
                    }
                    at += STEP;
                }
                while at < end {
                    sums = s.fma(s.mul(w.one(weights.add(at)), scale), s.load(inputs.add(at)), sums);
                    at += LANES;
                }
            }
        }
        s.reduce_add(sums)
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::*;

    use qwen_formats::{DType, blocks};

    use super::{Row, Widen};
    use crate::kernels::simd::{Avx512, Simd};

    /// The magnitudes of a type as bfloat16, which holds each exactly: low bytes and high bytes.
    struct Tables {
        low: [u8; 128],
        high: [u8; 128],
    }

    impl Tables {
        const E4M3: Self = Self::of(true);
        const E5M2: Self = Self::of(false);

        const fn of(e4m3: bool) -> Self {
            let mut tables = Self { low: [0; 128], high: [0; 128] };
            let mut i = 0;
            while i < 128 {
                let value = if e4m3 { blocks::f8_e4m3_to_f32(i as u8) } else { blocks::f8_e5m2_to_f32(i as u8) };
                let [_, _, low, high] = value.to_bits().to_le_bytes();
                (tables.low[i], tables.high[i]) = (low, high);
                i += 1;
            }
            tables
        }
    }

    /// For each byte of the interleaved halves, the weight that comes there: even and odd halves of either register are then sixteen
    /// weights in order.
    const ORDER: [u8; 64] = {
        let mut order = [0; 64];
        let mut i = 0;
        while i < 64 {
            let (lane, within) = (i / 16, i % 16);
            order[i] = (16 * (2 * (within / 8) + within % 2) + 4 * lane + within % 8 / 2) as u8;
            i += 1;
        }
        order
    };

    /// By tables; a value exists only where the processor has AVX-512 F, BW, VL, DQ and VBMI.
    #[derive(Clone, Copy)]
    struct ByTables {
        simd: Avx512,
        low: [__m512i; 2],
        high: [__m512i; 2],
        order: __m512i,
        e4m3: bool,
    }

    /// # Safety
    /// The processor has the instructions.
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi")]
    pub(super) unsafe fn run(dtype: DType, row: Row<'_>) -> f32 {
        let e4m3 = dtype != DType::F8E5M2;
        let tables = if e4m3 { const { &Tables::E4M3 } } else { const { &Tables::E5M2 } };
        // SAFETY: 64 bytes each; the caller's promise.
        let by_tables = unsafe {
            let load = |bytes: &[u8], at: usize| _mm512_loadu_si512(bytes[at..at + 64].as_ptr().cast());
            ByTables {
                simd: Avx512::assume(),
                low: [load(&tables.low, 0), load(&tables.low, 64)],
                high: [load(&tables.high, 0), load(&tables.high, 64)],
                order: load(&ORDER, 0),
                e4m3,
            }
        };
        row.sum(by_tables)
    }

    impl Widen for ByTables {
        type Simd = Avx512;

        #[inline(always)]
        fn simd(self) -> Avx512 {
            self.simd
        }
        #[inline(always)]
        unsafe fn one(self, p: *const u8) -> <Avx512 as Simd>::V {
            // SAFETY: the caller's promise.
            unsafe { if self.e4m3 { self.simd.load_e4m3(p) } else { self.simd.load_e5m2(p) } }
        }
        #[inline(always)]
        unsafe fn four(self, p: *const u8) -> [<Avx512 as Simd>::V; 4] {
            // SAFETY: the caller's promise; the value proves the instructions.
            unsafe {
                let codes = _mm512_permutexvar_epi8(self.order, _mm512_loadu_si512(p.cast()));
                let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
                let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
                // high | codes & 0x80
                let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, _mm512_set1_epi8(-128));
                let (first, second) = (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high));
                let mask = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
                [
                    self.simd.wrap(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(first))),
                    self.simd.wrap(_mm512_castsi512_ps(_mm512_and_si512(first, mask))),
                    self.simd.wrap(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(second))),
                    self.simd.wrap(_mm512_castsi512_ps(_mm512_and_si512(second, mask))),
                ]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::gemm::widen;
    use crate::kernels::testing::Random;

    /// The row widened, lane by lane.
    fn oracle(dtype: DType, row: Row<'_>) -> u32 {
        let mut values = vec![0.0; row.inputs.len()];
        widen::row(Isa::Scalar, dtype, row.weights, Some(row.scales), &mut values);
        let mut lanes = [0.0_f32; LANES];
        for (values, inputs) in values.chunks(LANES).zip(row.inputs.chunks(LANES)) {
            for j in 0..LANES {
                lanes[j] = values[j].mul_add(inputs[j], lanes[j]);
            }
        }
        for half in [8, 4, 2, 1] {
            for j in 0..half {
                lanes[j] += lanes[j + half];
            }
        }
        lanes[0].to_bits()
    }

    /// By the instruction set's own conversion.
    fn by_halves(isa: Isa, dtype: DType, row: Row<'_>) -> f32 {
        match dtype {
            DType::F8E5M2 => dispatch(isa, ByHalves::<false>(row)),
            _ => dispatch(isa, ByHalves::<true>(row)),
        }
    }

    #[test]
    fn a_row_has_the_bits_of_a_widened_one_on_every_instruction_set() {
        let mut random = Random::new(11);
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            for (k, columns) in [(16, 128), (64, 64), (256, 128), (304, 128), (208, 48), (1536, 128), (1056, 1 << 20)] {
                assert!(takes(dtype, k, columns));
                // All finite values.
                let limit = if dtype == DType::F8E4M3 { 0x7f } else { 0x7c };
                let finite = |byte: u8| if byte & 0x7f >= limit { byte & 0xbf } else { byte };
                let weights: Vec<u8> = (0..k).map(|_| finite(random.next() as u8)).collect();
                let scales = random.values(k.div_ceil(columns), 1.0);
                let inputs = random.values(k, 1.0);
                let row = Row { weights: &weights, scales: Scales { values: &scales, columns }, inputs: &inputs };
                let expected = oracle(dtype, row);
                for isa in Isa::available() {
                    assert_eq!(multiply(isa, dtype, row).to_bits(), expected, "{dtype} {k} {columns} {}", isa.name());
                    assert_eq!(by_halves(isa, dtype, row).to_bits(), expected, "{dtype} {k} {columns} {}", isa.name());
                }
            }
        }
    }

    #[test]
    fn every_byte_is_the_decoders_value() {
        let bytes: Vec<u8> = (0..=255).collect();
        for dtype in [DType::F8E4M3, DType::F8E5M2] {
            let mut values = [0.0; 256];
            qwen_formats::blocks::dequantize(dtype, &bytes, &mut values).unwrap();
            for (i, value) in values.iter().enumerate() {
                let (mut weights, mut inputs) = ([0; 256], [0.0; 256]);
                (weights[i], inputs[i]) = (bytes[i], 1.0);
                let row =
                    Row { weights: &weights, scales: Scales { values: &[1.0, 1.0], columns: 128 }, inputs: &inputs };
                for isa in Isa::available() {
                    let found = multiply(isa, dtype, row);
                    assert!(found == *value || found.is_nan() && value.is_nan(), "{dtype} {i}: {found} {value}");
                }
            }
        }
    }

    #[test]
    fn odd_numbers_of_inputs_and_columns_are_widened_instead() {
        assert!(!takes(DType::F8E4M3, 129, 128) && !takes(DType::F8E4M3, 256, 7) && !takes(DType::BF16, 256, 128));
        assert!(takes(DType::F8E5M2, 128, 1000) && !takes(DType::F8E5M2, 128, 0));
    }
}
