use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use qwen_formats::test_support::safetensors;

use super::*;
use qwen_ir::WeightSlice;

/// A checkpoint of float tensors, deleted with the value.
struct File {
    path: std::path::PathBuf,
    checkpoint: Arc<Checkpoint>,
}

impl Drop for File {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
    }
}

fn file(tensors: &[(&str, &[u64], &[f32])]) -> File {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    let data: Vec<_> = tensors.iter().map(|(_, _, values)| bytes(values)).collect();
    let tensors: Vec<_> =
        tensors.iter().zip(&data).map(|((name, shape, _), data)| (*name, "F32", *shape, &**data)).collect();
    let bytes = safetensors(&tensors);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("weights-{}-{number}.safetensors", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    let checkpoint = Arc::new(Checkpoint::open(&path).unwrap());
    File { path, checkpoint }
}

/// Values of a weight, or why there are none.
fn values(file: &File, shape: &[u64], tensors: &[&str], transform: Transform) -> Result<Vec<f32>, String> {
    values_of(file, shape, None, tensors, transform)
}

/// Values of a part of a weight.
fn values_of(
    file: &File,
    shape: &[u64],
    slice: Option<WeightSlice>,
    tensors: &[&str],
    transform: Transform,
) -> Result<Vec<f32>, String> {
    let source =
        WeightSource { dtype: DType::F32, tensors: tensors.iter().map(|&name| name.into()).collect(), transform };
    let decl = WeightDecl {
        name: "the weight".into(),
        shape: shape.to_vec(),
        sources: vec![source.clone()],
        first_layer: None,
        slice,
    };
    let store = WeightStore::new(Arc::clone(&file.checkpoint), &Graph::new("test"));
    let bytes = |bytes: &[u8]| bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
    match store.materialise(&decl, &source) {
        Ok(Material::Mapped(range)) => Ok(bytes(range.as_ref())),
        Ok(Material::Owned(owned)) => Ok(bytes(owned.as_ref())),
        Err(error) => Err(error.to_string()),
    }
}

fn counted() -> [f32; 24] {
    std::array::from_fn(|i| i as f32)
}

#[test]
fn a_tensor_as_stored_and_some_of_its_rows() {
    let file = file(&[("a", &[6, 4], &counted())]);
    assert_eq!(values(&file, &[6, 4], &["a"], Transform::AsStored).unwrap(), counted());
    assert_eq!(values(&file, &[6, 4], &["a"], Transform::ToF32).unwrap(), counted());
    assert_eq!(values(&file, &[2, 4], &["a"], Transform::Rows { first: 3 }).unwrap(), counted()[12..20]);
    let error = values(&file, &[6, 5], &["a"], Transform::AsStored).unwrap_err();
    assert_eq!(error, "weight a: expected 120 bytes of f32, found 96 bytes of f32 [6, 4]");
    for first in [5, 6, u64::MAX / 16, u64::MAX] {
        values(&file, &[2, 4], &["a"], Transform::Rows { first }).unwrap_err();
    }
    let error = values(&file, &[6, 4], &["b"], Transform::AsStored).unwrap_err();
    assert!(error.contains("weight b: expected a tensor of that name, found none in"), "{error}");
}

#[test]
fn experts_stored_one_by_one_are_stacked() {
    let all = counted();
    let file = file(&[("a", &[3, 4], &all[..12]), ("b", &[3, 4], &all[12..])]);
    assert_eq!(values(&file, &[2, 3, 4], &["a", "b"], Transform::Stack).unwrap(), all);
    for (shape, tensors) in [
        (&[2, 3, 4][..], &["a"][..]),
        (&[2, 3, 4], &["a", "c"]),
        (&[3, 3, 4], &["a", "b"]),
        (&[1, 25], &["a", "b"]),
        (&[1, 1], &[]),
        (&[1 << 40, 3, 4], &["a", "b"]),
    ] {
        values(&file, shape, tensors, Transform::Stack).unwrap_err();
    }
}

#[test]
fn rows_of_every_expert() {
    let file = file(&[("a", &[2, 4, 3], &counted())]);
    let rows = |shape: [u64; 3], first| values(&file, &shape, &["a"], Transform::ExpertRows { first });
    let expected: Vec<_> = counted()[3..9].iter().chain(&counted()[15..21]).copied().collect();
    assert_eq!(rows([2, 2, 3], 1).unwrap(), expected);
    for (shape, first) in [([2, 2, 3], 3), ([2, 2, 3], u64::MAX), ([3, 2, 3], 0), ([2, 2, 4], 0), ([2, 5, 3], 0)] {
        rows(shape, first).unwrap_err();
    }
}

#[test]
fn keys_are_transposed_before_the_values_of_their_head() {
    // Two heads, latent 2, nope 3, value 1.
    let (k, v) = (&counted()[..12], [100.0, 101.0, 102.0, 103.0]);
    let file = file(&[("k", &[2, 2, 3], k), ("v", &[2, 1, 2], &v)]);
    let merge = |[num_heads, nope_dim, value_dim]: [u64; 3], shape: [u64; 2]| {
        values(&file, &shape, &["k", "v"], Transform::MergeKvB { num_heads, nope_dim, value_dim })
    };
    let expected = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 100.0, 101.0, 6.0, 9.0, 7.0, 10.0, 8.0, 11.0, 102.0, 103.0].to_vec();
    assert_eq!(merge([2, 3, 1], [8, 2]).unwrap(), expected);
    for (sizes, shape) in [
        ([2, 1, 3], [8, 2]),
        ([2, 3, 2], [10, 2]),
        ([1 << 40, 1 << 40, 1], [8, 2]),
        ([0, 3, 1], [0, 2]),
        ([2, 3, 1], [8, 0]),
    ] {
        merge(sizes, shape).unwrap_err();
    }
}

/// A part of a weight is that part of the whole, whatever the weight is made of.
#[test]
fn parts_are_parts_of_the_whole() {
    let all = counted();
    let file =
        file(&[("a", &[6, 4], &all), ("b", &[3, 4], &all[..12]), ("c", &[3, 4], &all[12..]), ("e", &[2, 4, 3], &all)]);
    let cases: [(&[u64], &[&str], Transform); 5] = [
        (&[6, 4], &["a"], Transform::AsStored),
        (&[6, 4], &["a"], Transform::ToF32),
        (&[4, 4], &["a"], Transform::Rows { first: 1 }),
        (&[2, 3, 4], &["b", "c"], Transform::Stack),
        (&[2, 3, 3], &["e"], Transform::ExpertRows { first: 1 }),
    ];
    for (shape, tensors, transform) in cases {
        let whole = values(&file, shape, tensors, transform.clone()).unwrap();
        for (axis, of) in shape.iter().copied().enumerate() {
            for (first, count) in (0..of).flat_map(|first| (1..=of - first).map(move |count| (first, count))) {
                let slice = WeightSlice { axis: axis as u32, first, of };
                let mut part = shape.to_vec();
                part[axis] = count;
                let found = values_of(&file, &part, Some(slice), tensors, transform.clone()).unwrap();
                let inner: u64 = shape[axis + 1..].iter().product();
                let is_in = |i: usize| (first..first + count).contains(&(i as u64 / inner % of));
                let expected: Vec<f32> =
                    whole.iter().enumerate().filter(|(i, _)| is_in(*i)).map(|(_, value)| *value).collect();
                assert_eq!(found, expected, "{transform:?} {slice:?} {count}");
            }
            let slice = WeightSlice { axis: axis as u32, first: of, of };
            values_of(&file, shape, Some(slice), tensors, transform.clone()).unwrap_err();
        }
    }
}

/// Quantised blocks are cut where they begin, bytes as they are.
#[test]
fn blocks_are_not_cut() {
    let decl = |columns: u64| WeightDecl {
        name: "the weight".into(),
        shape: vec![2, columns],
        sources: Vec::new(),
        first_layer: None,
        slice: None,
    };
    let slice = WeightSlice { axis: 1, first: 32, of: 96 };
    let runs = part::Runs::new(&decl(32), &[2, 96], slice, DType::Q8_0).unwrap();
    let bytes: Vec<u8> = (0..2 * 3 * 34).map(|i| i as u8).collect();
    let mut found = vec![0; 2 * 34];
    runs.copy(&bytes, &mut found);
    assert_eq!(found, [&bytes[34..68], &bytes[136..170]].concat());
    for (first, columns) in [(16, 32), (32, 16), (96, 32)] {
        assert!(part::Runs::new(&decl(columns), &[2, 96], WeightSlice { first, ..slice }, DType::Q8_0).is_err());
    }
}

proptest! {
    /// Whatever sizes a config claims: a weight of the declared size or an error, and no memory that no file backs.
    #[test]
    fn claims_are_checked(
        shape in proptest::collection::vec(prop_oneof![0u64..8, Just(1 << 32), Just(u64::MAX)], 0..4),
        sizes in proptest::array::uniform3(prop_oneof![0u64..8, Just(1 << 40), Just(u64::MAX)]),
        tensors in proptest::sample::subsequence(vec!["a", "b", "none"], 0..4),
        kind in 0..6,
    ) {
        let file = file(&[("a", &[2, 3, 4], &counted()), ("b", &[2, 3, 4], &counted())]);
        let [first, nope_dim, value_dim] = sizes;
        let transform = match kind {
            0 => Transform::AsStored,
            1 => Transform::Stack,
            2 => Transform::Rows { first },
            3 => Transform::ExpertRows { first },
            4 => Transform::MergeKvB { num_heads: first, nope_dim, value_dim },
            _ => Transform::ToF32,
        };
        if let Ok(values) = values(&file, &shape, &tensors, transform) {
            prop_assert_eq!(values.len() as u64, shape.iter().product::<u64>());
            prop_assert!(values.len() <= 48);
        }
    }
}
