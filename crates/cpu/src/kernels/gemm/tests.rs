//! Against f64 oracles; every instruction set, batch and thread count with the same bits.

use proptest::prelude::*;
use proptest::sample::select;
use qwen_formats::{DType, blocks};

use super::form::{Form, PANEL};
use super::wide::{GROUP, WideGroup};
use super::*;
use crate::kernels::testing::{Random, Threads, bits};
use crate::parallel::Serial;

const QUANTISED: [DType; 12] = [
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::IQ4_NL,
    DType::IQ4_XS,
];
const FLOATS: [DType; 5] = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
const MODES: [Compute; 6] =
    [Compute::F32, Compute::I8G32, Compute::I8G16, Compute::I8X2G32, Compute::I8SG32, Compute::Bf16];

/// A weight with random content.
struct Weight {
    layout: WeightLayout,
    bytes: Vec<u8>,
    scales: Option<Vec<f32>>,
    /// [n][k], decoded by the file reader.
    values: Vec<f32>,
}

fn half_bytes(value: f32) -> [u8; 2] {
    crate::kernels::math::f32_to_f16(value).to_le_bytes()
}

/// File bytes whose values are of the order of 1.
fn file_bytes(random: &mut Random, dtype: DType, count: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> =
        (0..count / dtype.block_len() * dtype.block_bytes()).map(|_| random.next() as u8).collect();
    let Some(form) = Form::of(dtype) else {
        for (bytes, _) in bytes.chunks_exact_mut(dtype.block_bytes()).zip(0..) {
            let value = random.value();
            match dtype {
                DType::F32 => bytes.copy_from_slice(&value.to_le_bytes()),
                DType::F16 => bytes.copy_from_slice(&half_bytes(value)),
                DType::BF16 => bytes.copy_from_slice(&value.to_le_bytes()[2..]),
                // Any byte but the NaNs and infinities of the top exponent.
                _ => bytes[0] &= 0xbf,
            }
        }
        return bytes;
    };
    // Codes of the type reach about this far, times a scale of the scale for the types that have one.
    let reach = f32::from(form.centre).max(if form.centre == 0 { 128.0 } else { 1.0 });
    let inner = match dtype {
        DType::Q2_K => 8.0,
        DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::IQ4_XS => 32.0,
        DType::Q6_K => 64.0,
        _ => 1.0,
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for (i, &at) in form.half_fields.iter().enumerate() {
            if dtype == DType::IQ4_XS && i == 1 {
                continue;
            }
            let scale = (0.5 + 0.5 * random.value().abs()) / (reach * inner);
            // Minima take the codes' middle away, roughly.
            let field = match (i, dtype) {
                (1, DType::Q4_1 | DType::Q5_1) => -scale * reach * 1.1,
                (1, _) => scale * reach,
                _ => scale,
            };
            block[at..at + 2].copy_from_slice(&half_bytes(field));
        }
    }
    bytes
}

fn weight(random: &mut Random, dtype: DType, n: usize, k: usize, block: Option<[usize; 2]>) -> Weight {
    let layout = WeightLayout::for_dtype(dtype, n, k, block).unwrap();
    let file = file_bytes(random, dtype, n * k);
    let mut values = vec![0.0; n * k];
    blocks::dequantize(dtype, &file, &mut values).unwrap();
    let scales: Option<Vec<f32>> = block.map(|_| random.values(layout.num_scales(), 2.0));
    if let (Some([rows, cols]), Some(scales)) = (block, &scales) {
        for (i, value) in values.iter_mut().enumerate() {
            *value *= scales[i / k / rows * k.div_ceil(cols) + i % k / cols];
        }
    }
    let mut bytes = vec![0; layout.packed_bytes()];
    layout.pack(&Threads(2), &file, &mut bytes).unwrap();
    if layout.packed_bytes() == 0 {
        bytes = file;
    }
    Weight { layout, bytes, scales, values }
}

impl Weight {
    fn segment(&self, compute: Compute) -> Segment<'_> {
        Segment { weight: &self.bytes, layout: self.layout, scales: self.scales.as_deref(), bias: None, compute }
    }

    /// y in f64.
    fn oracle(&self, x: &[f32]) -> Vec<f64> {
        let k = self.layout.k();
        let mut y = Vec::new();
        for x in x.chunks_exact(k) {
            for w in self.values.chunks_exact(k) {
                y.push(w.iter().zip(x).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum());
            }
        }
        y
    }
}

fn run_on(
    way: impl Into<Way>,
    parallel: &dyn Parallel,
    x: &[f32],
    segments: &[Segment<'_>],
    epilogue: Epilogue<'_>,
) -> Vec<f32> {
    let way = way.into();
    let k = segments[0].layout.k();
    let rows = x.len() / k;
    let mut cols: usize = segments.iter().map(|segment| segment.layout.n()).sum();
    if matches!(epilogue, Epilogue::Glu(_)) {
        cols /= 2;
    }
    let mut out = vec![f32::NAN; rows * cols];
    let sizes: Vec<_> = segments.iter().map(|segment| (segment.layout, segment.compute)).collect();
    let mut workspace = vec![0xaa; workspace_bytes_of(way, rows, 1, &sizes, parallel.threads())];
    let (x, y) = (Matrix::dense(x, rows, k), MatrixMut::dense(&mut out, rows, cols));
    gemm(way, parallel, x, segments, y, epilogue, &mut workspace).unwrap();
    out
}

fn nmse(found: &[f32], expected: &[f64]) -> f64 {
    let error: f64 = found.iter().zip(expected).map(|(&f, &e)| (f64::from(f) - e).powi(2)).sum();
    error / expected.iter().map(|e| e * e).sum::<f64>()
}

fn k_for(dtype: DType) -> usize {
    if dtype.block_len() == 256 { 768 } else { 576 }
}

#[test]
fn packing_keeps_every_value() {
    let mut random = Random::new(1);
    for dtype in QUANTISED {
        let form = Form::of(dtype).unwrap();
        for n in [1, 16, 37] {
            let w = weight(&mut random, dtype, n, k_for(dtype), None);
            let k = w.layout.k();
            let mut wide = vec![WideGroup::ZERO; k / GROUP];
            for (panel, expected) in w.bytes.chunks_exact(PANEL * w.layout.row_bytes()).zip(w.values.chunks(PANEL * k))
            {
                form.unpack(panel, &mut wide);
                for (i, expected) in expected.iter().enumerate() {
                    let (row, input) = (i / k, i % k);
                    let group = &wide[input / GROUP];
                    let half = if form.halves == 2 { input % GROUP / 16 } else { 0 };
                    let code = f32::from(group.codes[input % GROUP / 4][row][input % 4]) - 128.0;
                    let value = group.scale[half][row].mul_add(code, group.min[half][row]);
                    // A minimum is for codes minus their centre here, which rounds once more.
                    let error = if form.has_min { 1e-6 * group.min[half][row].abs() } else { 0.0 };
                    assert!((value - expected).abs() <= error, "{dtype} {n}: {value} and {expected}");
                }
            }
        }
    }
}

/// A value far above the rest in a quarter of the rows.
fn spike(random: &mut Random, x: &mut [f32], k: usize) {
    for row in x.chunks_exact_mut(k) {
        if random.range(0, 4) == 0 {
            row[random.range(0, k)] = 3000.0;
        }
    }
}

#[test]
fn a_group_with_a_spike_has_two_terms_and_its_neighbours_one() {
    let mut random = Random::new(12);
    // One group of 32: rows with a spike are those with two terms, bit for bit.
    let w = weight(&mut random, DType::Q4_1, 20, 32, None);
    let mut x: Vec<f32> = (0..20 * 32).map(|i| if i % 3 == 0 { 1.0 } else { -0.87 }).collect();
    x[3 * 32 + 7] = 3000.0;
    for isa in Isa::available() {
        let run = |compute| bits(&run_on(isa, &Threads(2), &x, &[w.segment(compute)], Epilogue::None));
        let (one, two, found) = (run(Compute::I8G32), run(Compute::I8X2G32), run(Compute::I8SG32));
        for row in 0..20 {
            let expected = if row == 3 { &two } else { &one };
            assert!(one[row * 20..][..20] != two[row * 20..][..20]);
            assert!(found[row * 20..][..20] == expected[row * 20..][..20], "{} row {row}", isa.name());
        }
    }
}

#[test]
fn the_second_term_of_a_spike_is_worth_it() {
    let mut random = Random::new(13);
    for (dtype, rows) in [(DType::Q4_0, 1), (DType::Q4_K, 1), (DType::Q4_0, 21), (DType::Q6_K, 21)] {
        let w = weight(&mut random, dtype, 40, 1536, None);
        let mut x = random.values(rows * 1536, 1.0);
        // A value that has most of the row's energy; its group's other values are lost to one term.
        for (i, row) in x.chunks_exact_mut(1536).enumerate() {
            row[(i * 97 + 1300) % 1536] = 500.0;
        }
        let expected = w.oracle(&x);
        let error = |compute| {
            let found = run_on(Isa::current(), &Serial, &x, &[w.segment(compute)], Epilogue::None);
            nmse(&found, &expected)
        };
        let (one, spiked) = (error(Compute::I8G32), error(Compute::I8SG32));
        assert!(spiked < one / 20.0, "{dtype} {rows}: {spiked:e} against {one:e}");
    }
}

#[test]
fn every_type_and_mode_is_close_to_the_oracle() {
    let mut random = Random::new(2);
    for dtype in QUANTISED.into_iter().chain(FLOATS) {
        let w = weight(&mut random, dtype, 37, k_for(dtype), None);
        let x = random.values(5 * w.layout.k(), 3.0);
        let expected = w.oracle(&x);
        for compute in MODES {
            let limit = match (dtype.is_block_quantised(), compute) {
                (true, Compute::I8G32 | Compute::I8SG32) => 3e-5,
                (true, Compute::I8G16) => 2.5e-5,
                (true, Compute::I8X2G32) => 1e-9,
                // Rounding to eight bits: errors of at most 2^-8 of a power of two, so a third of 2^-16 of its square.
                (false, Compute::Bf16) if dtype == DType::BF16 => 4e-6,
                _ => 1e-12,
            };
            for isa in Isa::available() {
                let found = run_on(isa, &Serial, &x, &[w.segment(compute)], Epilogue::None);
                let error = nmse(&found, &expected);
                assert!(error < limit, "{dtype} {compute:?} {}: {error:e}", isa.name());
            }
        }
    }
}

#[test]
fn every_way_gives_the_same_bits() {
    let mut random = Random::new(3);
    for dtype in QUANTISED.into_iter().chain(FLOATS) {
        let w = weight(&mut random, dtype, 35, k_for(dtype), None);
        for rows in [1, 2, 3, 5, 11, 14, 25] {
            let mut x = random.values(rows * w.layout.k(), 3.0);
            spike(&mut random, &mut x, w.layout.k());
            for compute in MODES {
                let expected = bits(&run_on(Isa::Scalar, &Serial, &x, &[w.segment(compute)], Epilogue::None));
                for way in Way::all(Isa::current()) {
                    let found = run_on(way, &Serial, &x, &[w.segment(compute)], Epilogue::None);
                    assert!(bits(&found) == expected, "{dtype} {compute:?} {} {rows} rows", way.name());
                }
            }
        }
    }
}

/// Random codes stay far from what sums of 16 bits hold.
#[test]
fn the_largest_codes_and_activations_do_not_overflow() {
    let (n, k) = (16, 256);
    for dtype in QUANTISED {
        let form = Form::of(dtype).unwrap();
        for code in [0x00, 0xff, 0x7f, 0x80] {
            let mut file = vec![code; n * k / dtype.block_len() * dtype.block_bytes()];
            for block in file.chunks_exact_mut(dtype.block_bytes()) {
                for &at in form.half_fields {
                    block[at..at + 2].copy_from_slice(&half_bytes(1.0));
                }
            }
            let layout = WeightLayout::for_dtype(dtype, n, k, None).unwrap();
            let mut bytes = vec![0; layout.packed_bytes()];
            layout.pack(&Serial, &file, &mut bytes).unwrap();
            for rows in [1, 4, 16] {
                // First terms of 127 units; second ones of as much as they can be, by values just below the middle of two codes.
                for value in [1.0, -1.0, 0.4999 / 127.0, -0.4999 / 127.0] {
                    let mut x: Vec<f32> = vec![value; rows * k];
                    x.iter_mut().step_by(32).for_each(|x| *x = x.signum());
                    for compute in [Compute::I8G32, Compute::I8G16, Compute::I8X2G32] {
                        let segment = Segment { weight: &bytes, layout, scales: None, bias: None, compute };
                        let expected = bits(&run_on(Isa::Scalar, &Serial, &x, &[segment], Epilogue::None));
                        for way in Way::all(Isa::current()) {
                            let found = run_on(way, &Serial, &x, &[segment], Epilogue::None);
                            assert!(bits(&found) == expected, "{dtype} {compute:?} {} {rows} x {value}", way.name());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_batch_or_on_threads() {
    let mut random = Random::new(4);
    for dtype in [DType::Q4_0, DType::Q4_1, DType::Q8_0, DType::Q4_K, DType::Q6_K, DType::Q2_K, DType::BF16, DType::F32]
    {
        for compute in MODES {
            let (n, k) = (random.range(17, 200), 256 * random.range(1, 4));
            let w = weight(&mut random, dtype, n, k, None);
            let rows = random.range(2, 71);
            let mut x = random.values(rows * k, 1.0);
            spike(&mut random, &mut x, k);
            let isa = Isa::current();
            let all = run_on(isa, &Threads(3), &x, &[w.segment(compute)], Epilogue::None);
            assert_eq!(bits(&all), bits(&run_on(isa, &Threads(7), &x, &[w.segment(compute)], Epilogue::None)));
            for (x, y) in x.chunks_exact(k).zip(all.chunks_exact(w.layout.n())) {
                let alone = run_on(isa, &Serial, x, &[w.segment(compute)], Epilogue::None);
                assert!(bits(&alone) == bits(y), "{dtype} {compute:?} {rows} rows");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Any type, mode, size, batch, instruction set and number of threads gives what the scalar code gives for a row alone.
    #[test]
    fn a_row_is_a_row(
        dtype in select([QUANTISED.as_slice(), FLOATS.as_slice()].concat()),
        compute in select(MODES.as_slice()),
        isa in select(Isa::available()),
        (n, k, rows) in (1usize..70, 1usize..5, 1usize..71),
        threads in 1usize..6,
        seed: u64,
    ) {
        let mut random = Random::new(seed);
        let k = if dtype.is_block_quantised() { k * dtype.block_len() } else { k * 37 };
        let w = weight(&mut random, dtype, n, k, None);
        let mut x = random.values(rows * k, 1.0);
        spike(&mut random, &mut x, k);
        let all = run_on(isa, &Threads(threads), &x, &[w.segment(compute)], Epilogue::None);
        let row = random.range(0, rows);
        let alone = run_on(Isa::Scalar, &Serial, &x[row * k..][..k], &[w.segment(compute)], Epilogue::None);
        prop_assert_eq!(bits(&all[row * n..][..n]), bits(&alone));
    }
}

#[test]
fn float_rows_of_any_length() {
    let mut random = Random::new(5);
    for dtype in FLOATS {
        for (n, k) in [(1, 1), (3, 7), (17, 33), (16, 16), (50, 100), (4, 129)] {
            let w = weight(&mut random, dtype, n, k, None);
            let x = random.values(8 * k, 1.0);
            for (compute, limit) in [(Compute::F32, 1e-12), (Compute::Bf16, 1e-5)] {
                let expected = run_on(Isa::Scalar, &Serial, &x, &[w.segment(compute)], Epilogue::None);
                assert!(nmse(&expected, &w.oracle(&x)) < limit, "{dtype} {n} x {k}");
                for isa in Isa::available() {
                    let found = run_on(isa, &Threads(2), &x, &[w.segment(compute)], Epilogue::None);
                    assert_eq!(bits(&found), bits(&expected), "{dtype} {compute:?} {n} x {k} {}", isa.name());
                }
            }
        }
    }
}

#[test]
fn separate_scales_multiply_their_rectangles() {
    let mut random = Random::new(6);
    for (dtype, block) in [(DType::F8E4M3, [128, 128]), (DType::F8E4M3, [16, 32]), (DType::BF16, [7, 5])] {
        for k in [200, 208] {
            let w = weight(&mut random, dtype, 150, k, Some(block));
            let x = random.values(3 * k, 1.0);
            let expected = run_on(Isa::Scalar, &Serial, &x, &[w.segment(Compute::F32)], Epilogue::None);
            assert!(nmse(&expected, &w.oracle(&x)) < 1e-12, "{dtype} {block:?} {k}");
            for isa in Isa::available() {
                let found = run_on(isa, &Threads(2), &x, &[w.segment(Compute::F32)], Epilogue::None);
                assert_eq!(bits(&found), bits(&expected), "{dtype} {block:?} {k} {}", isa.name());
                // A row alone is multiplied straight from the bytes, where they suit.
                let alone = run_on(isa, &Threads(2), &x[k..2 * k], &[w.segment(Compute::F32)], Epilogue::None);
                assert_eq!(bits(&alone), bits(&expected[150..300]), "{dtype} {block:?} {k} {} alone", isa.name());
            }
        }
    }
}

/// Segments of different types and modes share x; each gives what it gives alone.
#[test]
fn segments_lie_side_by_side() {
    let mut random = Random::new(7);
    let k = 512;
    let weights = [
        (weight(&mut random, DType::Q4_K, 33, k, None), Compute::I8G32),
        (weight(&mut random, DType::Q6_K, 16, k, None), Compute::I8G32),
        (weight(&mut random, DType::F16, 7, k, None), Compute::F32),
        (weight(&mut random, DType::Q8_0, 20, k, None), Compute::I8X2G32),
        (weight(&mut random, DType::Q4_0, 5, k, None), Compute::I8G16),
    ];
    let biases: Vec<_> = weights.iter().map(|(w, _)| random.values(w.layout.n(), 5.0)).collect();
    for rows in [1, 14] {
        let x = random.values(rows * k, 1.0);
        let mut segments: Vec<_> = weights.iter().map(|(w, compute)| w.segment(*compute)).collect();
        for (segment, bias) in segments.iter_mut().zip(&biases).skip(1) {
            segment.bias = Some(bias);
        }
        let all = run_on(Isa::current(), &Threads(2), &x, &segments, Epilogue::None);
        let mut first = 0;
        for (i, segment) in segments.iter().enumerate() {
            let plain = Segment { bias: None, ..*segment };
            let n = segment.layout.n();
            let alone = run_on(Isa::current(), &Serial, &x, &[plain], Epilogue::None);
            for (row, all) in all.chunks_exact(81).enumerate() {
                for col in 0..n {
                    let bias = if i == 0 { 0.0 } else { biases[i][col] };
                    assert_eq!(all[first + col], alone[row * n + col] + bias, "segment {i} row {row} column {col}");
                }
            }
            first += n;
        }
    }
}

#[test]
fn gated_units_pair_columns() {
    let mut random = Random::new(8);
    let k = 256;
    let gate = weight(&mut random, DType::Q4_1, 600, k, None);
    let up = weight(&mut random, DType::Q6_K, 600, k, None);
    let mut x = random.values(9 * k, 0.2);
    spike(&mut random, &mut x, k);
    for (activation, function, rows) in [
        (Activation::Silu, crate::kernels::math::silu_f32 as fn(f32) -> f32, 9),
        (Activation::GeluTanh, crate::kernels::math::gelu_tanh_f32, 9),
        (Activation::Silu, crate::kernels::math::silu_f32, 1),
        (Activation::Silu, crate::kernels::math::silu_f32, 3),
    ] {
        let x = &x[..rows * k];
        for (isa, compute) in
            Isa::available().into_iter().flat_map(|isa| [(isa, Compute::I8X2G32), (isa, Compute::I8SG32)])
        {
            let segments = [gate.segment(Compute::I8G32), up.segment(compute)];
            let both = run_on(isa, &Threads(2), x, &segments, Epilogue::Glu(activation));
            let y0 = run_on(isa, &Serial, x, &segments[..1], Epilogue::None);
            let y1 = run_on(isa, &Serial, x, &segments[1..], Epilogue::None);
            let expected: Vec<f32> = y0.iter().zip(&y1).map(|(&a, &b)| function(a) * b).collect();
            assert_eq!(bits(&both), bits(&expected), "{activation:?} {compute:?} {rows} rows {}", isa.name());
        }
    }
}

#[test]
fn the_addend_may_be_the_output() {
    let mut random = Random::new(9);
    let (n, k, rows) = (70, 288, 13);
    let w = weight(&mut random, DType::Q8_0, n, k, None);
    let x = random.values(rows * k, 1.0);
    let addend = random.values(rows * n, 1.0);
    let segments = [w.segment(Compute::I8G32)];
    let plain = run_on(Isa::current(), &Serial, &x, &segments, Epilogue::None);
    let expected: Vec<f32> = plain.iter().zip(&addend).map(|(y, a)| y + a).collect();
    let apart = run_on(Isa::current(), &Threads(2), &x, &segments, Epilogue::Add(Matrix::dense(&addend, rows, n)));
    assert_eq!(bits(&apart), bits(&expected));

    let mut memory = addend;
    let mut workspace = vec![0; workspace_bytes(rows, 1, &[(w.layout, Compute::I8G32)], 2)];
    // SAFETY: one buffer for addend and output, as the op allows.
    let (add, out) = unsafe {
        let p = memory.as_mut_ptr();
        (Matrix::from_raw(p, rows, n, n), MatrixMut::from_raw(p, rows, n, n))
    };
    let x = Matrix::dense(&x, rows, k);
    gemm(Isa::current(), &Threads(2), x, &segments, out, Epilogue::Add(add), &mut workspace).unwrap();
    assert_eq!(bits(&memory), bits(&expected));
}

#[test]
fn operands_may_be_columns_of_wider_ones() {
    let mut random = Random::new(10);
    let (n, k, rows) = (24, 64, 15);
    let w = weight(&mut random, DType::Q4_0, n, k, None);
    let wide = random.values(rows * (k + 9), 1.0);
    let x: Vec<f32> = wide.chunks_exact(k + 9).flat_map(|row| row[4..4 + k].to_vec()).collect();
    let expected = run_on(Isa::current(), &Serial, &x, &[w.segment(Compute::I8G32)], Epilogue::None);
    let mut out = vec![7.0; rows * 30];
    let mut workspace = vec![0; workspace_bytes(rows, 1, &[(w.layout, Compute::I8G32)], 1)];
    // SAFETY: ranges of the two buffers.
    let (x, y) = unsafe {
        (
            Matrix::from_raw(wide.as_ptr().add(4), rows, k, k + 9),
            MatrixMut::from_raw(out.as_mut_ptr().add(3), rows, n, 30),
        )
    };
    gemm(Isa::current(), &Serial, x, &[w.segment(Compute::I8G32)], y, Epilogue::None, &mut workspace).unwrap();
    for (row, expected) in out.chunks_exact(30).zip(expected.chunks_exact(n)) {
        assert_eq!(&row[3..3 + n], expected);
        assert!(row[..3].iter().chain(&row[3 + n..]).all(|&untouched| untouched == 7.0));
    }
}

/// Past the caches: a large output whose rows begin at lines, with a panel at the end that isn't whole, beside columns that stay.
#[test]
fn a_large_output_is_the_same_as_its_rows() {
    let mut random = Random::new(12);
    let (n, k, rows, stride) = (65_528, 32, 17, 65_536);
    let w = weight(&mut random, DType::Q4_0, n, k, None);
    let x = random.values(rows * k, 1.0);
    for isa in Isa::available() {
        let mut memory = vec![7.0; rows * stride + 16];
        let first = memory.as_ptr().align_offset(64);
        let out = &mut memory[first..][..rows * stride];
        let mut workspace = vec![0; workspace_bytes_of(isa.into(), rows, 1, &[(w.layout, Compute::I8G32)], 3)];
        // SAFETY: rows of the buffer.
        let y = unsafe { MatrixMut::from_raw(out.as_mut_ptr(), rows, n, stride) };
        assert!(epilogue::streams(&y));
        let x_rows = Matrix::dense(&x, rows, k);
        gemm(isa, &Threads(3), x_rows, &[w.segment(Compute::I8G32)], y, Epilogue::None, &mut workspace).unwrap();
        for (x, y) in x.chunks_exact(k).zip(out.chunks_exact(stride)) {
            let alone = run_on(isa, &Serial, x, &[w.segment(Compute::I8G32)], Epilogue::None);
            assert!(bits(&alone) == bits(&y[..n]), "{}", isa.name());
            assert!(y[n..].iter().all(|&untouched| untouched == 7.0));
        }
    }
}

#[test]
fn what_is_not_finite_stays_visible_in_its_row_alone() {
    let mut random = Random::new(11);
    let k = 256;
    for dtype in [DType::Q4_0, DType::Q4_K, DType::Q6_K, DType::F16] {
        let w = weight(&mut random, dtype, 20, k, None);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for compute in MODES {
                for isa in Isa::available() {
                    let mut x = random.values(3 * k, 1.0);
                    let clean = run_on(isa, &Serial, &x, &[w.segment(compute)], Epilogue::None);
                    x[k + 77] = bad;
                    let y = run_on(isa, &Serial, &x, &[w.segment(compute)], Epilogue::None);
                    assert!(y[20..40].iter().all(|y| !y.is_finite()), "{dtype} {compute:?} {bad} {}", isa.name());
                    assert_eq!(y[..20], clean[..20]);
                    assert_eq!(y[40..], clean[40..]);
                }
            }
        }
    }
}

#[test]
fn zeros_tiny_and_huge_values_survive_rounding() {
    let mut random = Random::new(12);
    let w = weight(&mut random, DType::Q8_0, 16, 64, None);
    for scale in [0.0, 1e-38, 1e-33, 1e-28, 1e30, 1e36] {
        let x = random.values(2 * 64, scale);
        let expected = w.oracle(&x);
        for compute in [Compute::I8G32, Compute::I8G16, Compute::I8X2G32] {
            let reference = run_on(Isa::Scalar, &Serial, &x, &[w.segment(compute)], Epilogue::None);
            for (&y, &e) in reference.iter().zip(&expected) {
                assert!((f64::from(y) - e).abs() <= 1e-2 * 64.0 * f64::from(scale) + 1e-28, "{scale} {y} {e}");
            }
            for isa in Isa::available() {
                assert_eq!(bits(&run_on(isa, &Serial, &x, &[w.segment(compute)], Epilogue::None)), bits(&reference));
            }
        }
    }
}

/// Experts against one product per row.
#[test]
fn experts_multiply_their_own_rows() {
    let mut random = Random::new(13);
    let (experts, n, k) = (9, 40, 256);
    for (dtype, compute) in [
        (DType::Q4_0, Compute::I8G32),
        (DType::Q4_K, Compute::I8X2G32),
        (DType::Q6_K, Compute::F32),
        (DType::BF16, Compute::F32),
    ] {
        let weights: Vec<_> = (0..experts).map(|_| weight(&mut random, dtype, n, k, None)).collect();
        let bytes: Vec<u8> = weights.iter().flat_map(|w| w.bytes.clone()).collect();
        for counts in [[0, 1, 0, 14, 2, 0, 0, 5, 3], [1, 0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 30]] {
            let mut offsets = vec![0];
            for count in counts {
                offsets.push(offsets.last().unwrap() + count);
            }
            let total = offsets[experts] as usize;
            let tokens = 6;
            let x = random.values(tokens * k, 1.0);
            let rows: Vec<i32> = (0..total).map(|_| random.range(0, tokens) as i32).collect();
            let segment = Segment { weight: &bytes, ..weights[0].segment(compute) };
            let sizes = [(segment.layout, compute)];
            for threads in [1, 2, 5] {
                let mut out = vec![f32::NAN; total * n];
                let mut workspace = vec![0x55; workspace_bytes(total, experts, &sizes, threads)];
                grouped_gemm(
                    Isa::current(),
                    &Threads(threads),
                    Matrix::dense(&x, tokens, k),
                    &offsets,
                    Some(&rows),
                    &[segment],
                    MatrixMut::dense(&mut out, total, n),
                    Epilogue::None,
                    &mut workspace,
                )
                .unwrap();
                for (sorted, y) in out.chunks_exact(n).enumerate() {
                    let expert = offsets.iter().rposition(|&offset| offset as usize <= sorted).unwrap();
                    let row = &x[rows[sorted] as usize * k..][..k];
                    let alone =
                        run_on(Isa::current(), &Serial, row, &[weights[expert].segment(compute)], Epilogue::None);
                    assert!(bits(y) == bits(&alone), "{dtype} {compute:?} sorted row {sorted} of {total}");
                }
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let mut random = Random::new(14);
    let w = weight(&mut random, DType::Q4_0, 20, 64, None);
    let segment = w.segment(Compute::I8G32);
    let x = random.values(4 * 64, 1.0);
    let mut workspace = vec![0; workspace_bytes(4, 3, &[(w.layout, Compute::I8G32)], 1)];
    let mut out = vec![0.0; 4 * 20];
    let mut call = |offsets: &[i32], rows: Option<&[i32]>, segments: &[Segment<'_>], bytes: usize| {
        let (x, y) = (Matrix::dense(&x, 4, 64), MatrixMut::dense(&mut out, 4, 20));
        let workspace = &mut workspace[..bytes];
        grouped_gemm(Isa::current(), &Serial, x, offsets, rows, segments, y, Epilogue::None, workspace)
    };
    let bytes = workspace_bytes(4, 1, &[(w.layout, Compute::I8G32)], 1);
    assert_eq!(call(&[0, 4], None, &[segment], bytes), Ok(()));
    assert!(matches!(call(&[0, 4], None, &[segment], bytes - 1), Err(KernelError::Workspace { .. })));
    assert!(matches!(call(&[0, 5], None, &[segment], bytes), Err(KernelError::Index { index: 1, found: 5, .. })));
    assert!(matches!(call(&[2, 1], None, &[segment], bytes), Err(KernelError::Index { index: 1, low: 2, .. })));
    assert!(matches!(call(&[-1, 1], None, &[segment], bytes), Err(KernelError::Index { index: 0, .. })));
    let rows = [0, 1, 4, 0];
    assert!(matches!(call(&[0, 4], Some(&rows), &[segment], bytes), Err(KernelError::Index { index: 2, .. })));
    assert_eq!(call(&[0, 2], Some(&rows), &[segment], bytes), Ok(()));
    assert!(matches!(call(&[0, 4], Some(&rows[..3]), &[segment], bytes), Err(KernelError::Shape { .. })));
    assert!(matches!(call(&[0, 2, 4], None, &[segment], bytes), Err(KernelError::Shape { .. })));
    assert!(matches!(call(&[0, 4], None, &[segment, segment], bytes), Err(KernelError::Shape { .. })));
    assert!(matches!(call(&[0, 4], None, &[], bytes), Err(KernelError::Shape { .. })));
    let short = Segment { weight: &w.bytes[1..], ..segment };
    assert!(matches!(call(&[0, 4], None, &[short], bytes), Err(KernelError::Shape { .. })));
    assert!(WeightLayout::for_dtype(DType::Q4_K, 16, 64, None).is_err());
    assert!(WeightLayout::for_dtype(DType::I64, 16, 64, None).is_err());
    assert!(WeightLayout::for_dtype(DType::Q4_0, 0, 64, None).is_err());
    assert!(WeightLayout::for_dtype(DType::Q4_0, usize::MAX, 64, None).is_err());
}

#[test]
fn packed_size_is_the_files_with_whole_panels() {
    for dtype in QUANTISED {
        let layout = WeightLayout::for_dtype(dtype, 33, 512, None).unwrap();
        assert_eq!(layout.packed_bytes(), layout.source_bytes() / 33 * 48);
    }
    for dtype in FLOATS {
        assert_eq!(WeightLayout::for_dtype(dtype, 33, 512, None).unwrap().packed_bytes(), 0);
    }
}
