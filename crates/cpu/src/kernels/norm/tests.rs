use super::*;
use crate::kernels::math::{f32_to_bf16, f32_to_f16};
use crate::kernels::testing::{Random, Threads, bits, close};
use crate::parallel::Serial;

fn oracle(x: &[f32], weight: &[f32], eps: f64) -> Vec<f64> {
    x.chunks(weight.len())
        .flat_map(|group| {
            let mean = group.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / group.len() as f64;
            let factor = 1.0 / (mean + eps).sqrt();
            group.iter().zip(weight).map(move |(&x, &w)| f64::from(x) * factor * f64::from(w)).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn follows_the_formula_on_every_instruction_set_and_in_place() {
    let mut random = Random::new(1);
    for (rows, axis, groups) in [(1, 1, 1), (3, 12, 1), (2, 64, 3), (5, 100, 2), (2, 576, 1), (64, 1536, 1)] {
        let x = random.values(rows * axis * groups, 3.0);
        let weight: Vec<f32> = random.values(axis, 2.0);
        let half: Vec<u8> = weight.iter().flat_map(|&w| f32_to_f16(w).to_le_bytes()).collect();
        let brain: Vec<u8> = weight.iter().flat_map(|&w| f32_to_bf16(w).to_le_bytes()).collect();
        let single: Vec<u8> = weight.iter().flat_map(|w| w.to_le_bytes()).collect();
        for (dtype, bytes, tolerance) in
            [(DType::F32, &single, 2e-6), (DType::F16, &half, 1e-2), (DType::BF16, &brain, 5e-2)]
        {
            let mut first: Option<Vec<u32>> = None;
            for isa in Isa::available() {
                let mut out = x.clone();
                let view = MatrixMut::dense(&mut out, rows, axis * groups);
                // SAFETY: in place, as the op allows.
                let input = unsafe { Matrix::from_raw(view.row_ptr(0), rows, axis * groups, axis * groups) };
                rms_norm(isa, &Threads(3), input, NormWeight { dtype, bytes }, axis, 1e-5, view).unwrap();
                close(&out, &oracle(&x, &weight, 1e-5), tolerance);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{}", isa.name());
            }
        }
    }
}

#[test]
fn refuses_what_does_not_fit() {
    let x = [1.0; 8];
    let mut out = [0.0; 8];
    let weight = [0; 12];
    let run = |weight, axis, out: &mut [f32]| {
        rms_norm(Isa::Scalar, &Serial, Matrix::dense(&x, 2, 4), weight, axis, 1e-5, MatrixMut::dense(out, 2, 4))
    };
    let three = NormWeight { dtype: DType::F32, bytes: &weight };
    assert!(matches!(run(three, 3, &mut out), Err(KernelError::Shape { what: "axis", .. })));
    assert!(matches!(run(three, 4, &mut out), Err(KernelError::Shape { what: "weight bytes", .. })));
    assert!(matches!(run(three, 0, &mut out), Err(KernelError::Shape { .. })));
    let blocks = NormWeight { dtype: DType::Q4_0, bytes: &weight };
    assert!(matches!(run(blocks, 4, &mut out), Err(KernelError::Type { found: DType::Q4_0, .. })));
}
