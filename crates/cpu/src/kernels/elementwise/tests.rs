use super::*;
use crate::kernels::math::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::kernels::testing::{Random, Threads, bits, close};
use crate::parallel::Serial;

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

const SHAPES: [(usize, usize); 5] = [(1, 1), (3, 15), (2, 64), (5, 100), (40, 1536)];

#[test]
fn functions_follow_their_formulas() {
    let mut random = Random::new(3);
    for (rows, cols) in SHAPES {
        let (a, b) = (random.values(rows * cols, 9.0), random.values(rows * cols, 2.0));
        let column = random.values(rows, 2.0);
        type Run<'a> = &'a dyn Fn(Isa, MatrixMut<'_, f32>) -> Result<(), KernelError>;
        let threads = Threads(3);
        let view = |x| Matrix::dense(x, rows, cols);
        let wide = |f: &dyn Fn(f64, f64, f64) -> f64| -> Vec<f64> {
            (0..rows * cols).map(|i| f(a[i].into(), b[i].into(), column[i / cols].into())).collect()
        };
        let one_column = Matrix::dense(&column, rows, 1);
        let cases: [(Run<'_>, Vec<f64>); 9] = [
            (&|isa, out| glu(isa, &threads, Activation::Silu, view(&a), view(&b), out), wide(&|a, b, _| silu(a) * b)),
            (
                &|isa, out| glu(isa, &threads, Activation::GeluTanh, view(&a), view(&b), out),
                wide(&|a, b, _| gelu(a) * b),
            ),
            (&|isa, out| binary(isa, &threads, Binary::Add, view(&a), view(&b), out), wide(&|a, b, _| a + b)),
            (&|isa, out| binary(isa, &threads, Binary::Mul, view(&a), view(&b), out), wide(&|a, b, _| a * b)),
            (&|isa, out| binary(isa, &threads, Binary::Add, view(&a), one_column, out), wide(&|a, _, c| a + c)),
            (&|isa, out| binary(isa, &threads, Binary::Mul, view(&a), one_column, out), wide(&|a, _, c| a * c)),
            (&|isa, out| unary(isa, &threads, Unary::Silu, view(&a), out), wide(&|a, _, _| silu(a))),
            (&|isa, out| unary(isa, &threads, Unary::GeluTanh, view(&a), out), wide(&|a, _, _| gelu(a))),
            (
                &|isa, out| unary(isa, &threads, Unary::Sigmoid, view(&a), out),
                wide(&|a, _, _| 1.0 / (1.0 + (-a).exp())),
            ),
        ];
        for (run, expected) in cases {
            let mut first: Option<Vec<u32>> = None;
            for isa in Isa::available() {
                let mut out = vec![0.0; rows * cols];
                run(isa, MatrixMut::dense(&mut out, rows, cols)).unwrap();
                close(&out, &expected, 2e-6);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{}", isa.name());
            }
        }
    }
}

#[test]
fn works_in_place_on_column_ranges() {
    let mut random = Random::new(4);
    let (rows, cols) = (7, 48);
    let joined = random.values(rows * 2 * cols, 3.0);
    let mut dense = vec![0.0; rows * cols];
    let half = |p: *const f32, offset: usize| {
        // SAFETY: a column range of the joined matrix.
        unsafe { Matrix::from_raw(p.add(offset), rows, cols, 2 * cols) }
    };
    let (gate, up) = (half(joined.as_ptr(), 0), half(joined.as_ptr(), cols));
    glu(Isa::current(), &Serial, Activation::Silu, gate, up, MatrixMut::dense(&mut dense, rows, cols)).unwrap();
    let mut in_place = joined.clone();
    let p = in_place.as_mut_ptr();
    // SAFETY: as above, in place.
    let out = unsafe { MatrixMut::from_raw(p, rows, cols, 2 * cols) };
    glu(Isa::current(), &Serial, Activation::Silu, half(p, 0), half(p, cols), out).unwrap();
    for row in 0..rows {
        assert_eq!(bits(&in_place[row * 2 * cols..][..cols]), bits(&dense[row * cols..][..cols]));
        assert_eq!(bits(&in_place[row * 2 * cols + cols..][..cols]), bits(&joined[row * 2 * cols + cols..][..cols]));
    }
}

#[test]
fn casts_between_float_types() {
    let mut random = Random::new(5);
    for (rows, cols) in SHAPES {
        let x = random.values(rows * cols, 70_000.0);
        let half: Vec<u16> = x.iter().map(|&x| f32_to_f16(x)).collect();
        let brain: Vec<u16> = x.iter().map(|&x| f32_to_bf16(x)).collect();
        let eight: Vec<u8> = (0..rows * cols).map(|_| random.next() as u8).collect();
        for isa in Isa::available() {
            let mut narrow = vec![0u16; rows * cols];
            let input = FloatMatrix::F32(Matrix::dense(&x, rows, cols));
            cast(isa, &Threads(2), input, FloatMatrixMut::F16(MatrixMut::dense(&mut narrow, rows, cols))).unwrap();
            assert_eq!(narrow, half);
            cast(isa, &Threads(2), input, FloatMatrixMut::Bf16(MatrixMut::dense(&mut narrow, rows, cols))).unwrap();
            assert_eq!(narrow, brain);
            let mut wide = vec![0.0; rows * cols];
            let input = FloatMatrix::F16(Matrix::dense(&half, rows, cols));
            cast(isa, &Serial, input, FloatMatrixMut::F32(MatrixMut::dense(&mut wide, rows, cols))).unwrap();
            assert_eq!(bits(&wide), bits(&half.iter().map(|&h| f16_to_f32(h)).collect::<Vec<_>>()));
            let input = FloatMatrix::Bf16(Matrix::dense(&brain, rows, cols));
            cast(isa, &Serial, input, FloatMatrixMut::F32(MatrixMut::dense(&mut wide, rows, cols))).unwrap();
            assert_eq!(bits(&wide), bits(&brain.iter().map(|&h| bf16_to_f32(h)).collect::<Vec<_>>()));
            for dtype in [DType::F8E4M3, DType::F8E5M2] {
                let view = Matrix::dense(&eight, rows, cols);
                let input = if dtype == DType::F8E4M3 { FloatMatrix::F8E4M3(view) } else { FloatMatrix::F8E5M2(view) };
                cast(isa, &Serial, input, FloatMatrixMut::F32(MatrixMut::dense(&mut wide, rows, cols))).unwrap();
                let mut expected = vec![0.0; rows * cols];
                blocks::dequantize(dtype, &eight, &mut expected).unwrap();
                assert_eq!(bits(&wide), bits(&expected));
            }
        }
    }
}

#[test]
fn copies_strided_rows_and_refuses_other_shapes() {
    let x: Vec<u8> = (0..60).collect();
    let mut out = [0; 24];
    // SAFETY: four rows of six bytes in sixty.
    let view = unsafe { Matrix::from_raw(x.as_ptr(), 4, 6, 15) };
    copy(&Serial, view, MatrixMut::dense(&mut out, 4, 6)).unwrap();
    assert_eq!(out[6..12], x[15..21]);
    assert!(copy(&Serial, view, MatrixMut::dense(&mut out, 3, 6)).is_err());
    let a = [0.0; 6];
    let mut y = [0.0; 6];
    let result = binary(
        Isa::Scalar,
        &Serial,
        Binary::Add,
        Matrix::dense(&a, 2, 3),
        Matrix::dense(&a, 2, 2),
        MatrixMut::dense(&mut y, 2, 3),
    );
    assert!(matches!(result, Err(KernelError::Shape { expected: 3, found: 2, .. })));
}
