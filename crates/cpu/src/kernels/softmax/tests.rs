use super::*;
use crate::kernels::testing::{Random, Threads, bits, close};
use crate::parallel::Serial;

#[test]
fn follows_the_formula_on_every_instruction_set() {
    let mut random = Random::new(6);
    for (rows, cols, scale) in [(1, 1, 1.0), (4, 7, 3.0), (3, 16, 100.0), (9, 1000, 20.0), (2, 49_152, 5.0)] {
        let x = random.values(rows * cols, scale);
        let expected: Vec<f64> = x
            .chunks(cols)
            .flat_map(|row| {
                let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let e: Vec<f64> = row.iter().map(|&x| (f64::from(x) - f64::from(best)).exp()).collect();
                let sum: f64 = e.iter().sum();
                e.into_iter().map(move |e| e / sum)
            })
            .collect();
        let mut first: Option<Vec<u32>> = None;
        for isa in Isa::available() {
            let mut out = vec![0.0; rows * cols];
            softmax(isa, &Threads(2), Matrix::dense(&x, rows, cols), MatrixMut::dense(&mut out, rows, cols)).unwrap();
            close(&out, &expected, 2e-6);
            assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{}", isa.name());
        }
    }
}

#[test]
fn masked_values_get_nothing_and_nan_spreads_over_its_row_only() {
    let x = [f32::NEG_INFINITY, 1.0, 1.0, 0.0, f32::NAN, 1.0, 5.0, 5.0, f32::NEG_INFINITY];
    let mut out = [0.0; 9];
    for isa in Isa::available() {
        softmax(isa, &Serial, Matrix::dense(&x, 3, 3), MatrixMut::dense(&mut out, 3, 3)).unwrap();
        assert_eq!(out[..3], [0.0, 0.5, 0.5]);
        assert!(out[3..6].iter().all(|x| x.is_nan()));
        assert_eq!(out[6..], [0.5, 0.5, 0.0]);
    }
}
