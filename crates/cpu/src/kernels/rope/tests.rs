use super::*;
use crate::kernels::testing::{Random, Threads, bits, close};
use crate::parallel::Serial;

fn oracle(args: &RopeArgs, x: &[f32], position: i32, inv_freq: &[f32]) -> Vec<f64> {
    let mut y: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
    let pairs = inv_freq.len();
    for head in 0..args.num_heads {
        for (i, &freq) in inv_freq.iter().enumerate() {
            let (a, b) = match args.style {
                RopeStyle::Half => (i, i + pairs),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let start = head * args.head_dim + args.rotary_offset;
            // The angle is a product of two f32 values, rounded to f32, by definition.
            let angle = f64::from(position as f32 * freq);
            let (sine, cosine) =
                (angle.sin() * f64::from(args.attention_factor), angle.cos() * f64::from(args.attention_factor));
            let (u, v) = (f64::from(x[start + a]), f64::from(x[start + b]));
            y[start + a] = u * cosine - v * sine;
            y[start + b] = v * cosine + u * sine;
        }
    }
    y
}

#[test]
fn rotates_both_styles_partly_and_in_place() {
    let mut random = Random::new(2);
    for style in [RopeStyle::Half, RopeStyle::Interleaved] {
        for (num_heads, head_dim, rotary_offset, rotary_dim) in
            [(1, 2, 0, 2), (3, 64, 0, 64), (2, 24, 8, 12), (9, 128, 0, 128), (4, 192, 128, 64), (2, 80, 0, 40)]
        {
            let args = RopeArgs { num_heads, head_dim, rotary_offset, rotary_dim, style, attention_factor: 1.25 };
            let positions = [0, 1, 77, 131_071, 4095, 1_000_003];
            let inv_freq: Vec<f32> =
                (0..rotary_dim / 2).map(|i| 10_000f32.powf(-2.0 * i as f32 / rotary_dim as f32)).collect();
            let cols = num_heads * head_dim;
            let x = random.values(positions.len() * cols, 2.0);
            let expected: Vec<f64> =
                positions.iter().zip(x.chunks(cols)).flat_map(|(&p, row)| oracle(&args, row, p, &inv_freq)).collect();
            let mut first: Option<Vec<u32>> = None;
            for isa in Isa::available() {
                let mut out = vec![0.0; x.len()];
                let input = Matrix::dense(&x, positions.len(), cols);
                rope(
                    isa,
                    &Threads(2),
                    &args,
                    input,
                    &positions,
                    &inv_freq,
                    MatrixMut::dense(&mut out, positions.len(), cols),
                )
                .unwrap();
                close(&out, &expected, 2e-6);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{}", isa.name());
                let mut in_place = x.clone();
                let view = MatrixMut::dense(&mut in_place, positions.len(), cols);
                // SAFETY: in place, as the op allows.
                let input = unsafe { Matrix::from_raw(view.row_ptr(0), positions.len(), cols, cols) };
                rope(isa, &Serial, &args, input, &positions, &inv_freq, view).unwrap();
                assert_eq!(bits(&in_place), bits(&out));
            }
        }
    }
}

#[test]
fn refuses_what_does_not_fit() {
    let mut out = [0.0; 8];
    let x = [0.0; 8];
    let mut run = |head_dim, rotary_dim, frequencies: usize| {
        let args = RopeArgs {
            num_heads: 1,
            head_dim,
            rotary_offset: 2,
            rotary_dim,
            style: RopeStyle::Half,
            attention_factor: 1.0,
        };
        rope(
            Isa::Scalar,
            &Serial,
            &args,
            Matrix::dense(&x, 1, 8),
            &[1],
            &vec![1.0; frequencies],
            MatrixMut::dense(&mut out, 1, 8),
        )
    };
    assert!(run(8, 6, 3).is_ok());
    assert!(run(8, 8, 4).is_err());
    assert!(run(8, 5, 2).is_err());
    assert!(run(8, 6, 2).is_err());
    assert!(run(4, 2, 1).is_err());
}
