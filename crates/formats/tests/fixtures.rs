//! The checkpoints under `fixtures/`: made by other libraries, so they are the outside opinion.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests fail like tests")]

use std::path::{Path, PathBuf};

use qwen_formats::{Checkpoint, Container, DType, blocks};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn files(directory: &str, extension: &str) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = std::fs::read_dir(fixtures().join(directory))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    paths.sort();
    paths
}

fn values(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let view = checkpoint.tensor(name).unwrap_or_else(|| panic!("tensor {name}"));
    let mut values = vec![0.0; view.elements()];
    blocks::dequantize(view.dtype, view.data, &mut values).unwrap();
    values
}

/// `<type>.bytes` hold random blocks with edge-case scales, `<type>.values` what the gguf Python package makes of them.
#[test]
fn every_block_type_equals_the_gguf_package_bit_for_bit() {
    let checkpoint = Checkpoint::open(&fixtures().join("gguf/blocks.safetensors")).unwrap();
    let mut seen = Vec::new();
    for info in checkpoint.tensors() {
        let Some(type_name) = info.name.strip_suffix(".bytes") else { continue };
        let dtype: DType = type_name.parse().unwrap();
        let expected = values(&checkpoint, &format!("{type_name}.values"));
        let bytes = checkpoint.view(info).unwrap().data;
        let mut decoded = vec![0.0; expected.len()];
        blocks::dequantize(dtype, bytes, &mut decoded).unwrap();
        for (place, (decoded, expected)) in decoded.iter().zip(&expected).enumerate() {
            // Payload and sign of a NaN depend on operand order in the processor, not on the format.
            let same = decoded.to_bits() == expected.to_bits() || decoded.is_nan() && expected.is_nan();
            assert!(same, "{dtype} value {place}: {decoded:e} is not {expected:e}");
        }
        seen.push(dtype);
    }
    let missing: Vec<DType> =
        DType::ALL.into_iter().filter(|dtype| dtype.is_block_quantised() && !seen.contains(dtype)).collect();
    assert!(missing.is_empty(), "no fixture for {missing:?}");
}

#[test]
fn every_gguf_fixture_opens_and_decodes() {
    let paths = files("gguf", "gguf");
    assert!(paths.len() >= 15, "{paths:?}");
    for path in paths {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.container(), Container::Gguf);
        assert!(!checkpoint.metadata().unwrap().str("general.architecture").unwrap().is_empty());
        assert!(checkpoint.total_bytes() <= checkpoint.file_bytes());
        for info in checkpoint.tensors() {
            assert!(
                values(&checkpoint, &info.name).iter().all(|value| value.is_finite()),
                "{} {}",
                path.display(),
                info.name
            );
        }
    }
}

#[test]
fn a_split_checkpoint_equals_the_single_file() {
    let single = Checkpoint::open(&fixtures().join("gguf/llama-q4_k.gguf")).unwrap();
    let split = Checkpoint::open(&fixtures().join("gguf/split/llama-q4_k-00001-of-00003.gguf")).unwrap();
    assert_eq!(split.shard_paths().len(), 3);
    assert!(split.tensors().any(|info| info.shard == 2));
    assert_eq!(single.tensors().len(), split.tensors().len());
    for (single_info, split_info) in single.tensors().zip(split.tensors()) {
        assert_eq!(
            (&single_info.name, single_info.dtype, &single_info.shape),
            (&split_info.name, split_info.dtype, &split_info.shape)
        );
        assert_eq!(single.view(single_info).unwrap().data, split.view(split_info).unwrap().data);
    }
}

#[test]
fn every_model_directory_opens_and_agrees_with_the_safetensors_crate() {
    let mut count = 0;
    for entry in std::fs::read_dir(fixtures().join("models")).unwrap() {
        let directory = entry.unwrap().path();
        let checkpoint = Checkpoint::open(&directory).unwrap();
        assert_eq!(checkpoint.container(), Container::Safetensors);
        assert!(checkpoint.metadata().is_none());
        for file in checkpoint.shard_paths() {
            let bytes = std::fs::read(file).unwrap();
            let other = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            for (name, view) in other.tensors() {
                let ours = checkpoint.tensor(&name).unwrap();
                assert_eq!(ours.data, view.data(), "{name}");
                assert!(ours.shape.iter().map(|&dim| dim as usize).eq(view.shape().iter().copied()), "{name}");
            }
        }
        count += 1;
    }
    assert!(count >= 8);
}

#[test]
fn fp8_weights_decode_with_their_scales() {
    let checkpoint = Checkpoint::open(&fixtures().join("models/deepseek_v3_fp8")).unwrap();
    let mut decoded = 0;
    for info in checkpoint.tensors().filter(|info| info.dtype == DType::F8E4M3) {
        let weights = checkpoint.view(info).unwrap();
        let &[rows, cols] = weights.shape else { panic!("{} is no matrix", info.name) };
        let scale_name = format!("{}_scale_inv", info.name);
        let scales = values(&checkpoint, &scale_name);
        let mut out = vec![0.0; weights.elements()];
        blocks::dequantize_fp8_block(weights.data, &scales, rows as usize, cols as usize, 128, 128, &mut out).unwrap();
        assert!(out.iter().all(|value| value.is_finite()));
        let (last, scale) = (*weights.data.last().unwrap(), *scales.last().unwrap());
        assert_eq!(*out.last().unwrap(), blocks::f8_e4m3_to_f32(last) * scale);
        decoded += 1;
    }
    assert!(decoded > 0);
}
