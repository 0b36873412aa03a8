use super::*;
use crate::kernels::testing::{Random, Threads, bits, close};
use crate::parallel::Serial;

#[test]
fn sorts_pairs_by_expert_and_keeps_their_order() {
    let mut random = Random::new(8);
    for (tokens, top_k, experts) in [(0, 2, 4), (1, 1, 1), (5, 2, 3), (64, 8, 128), (100, 4, 7)] {
        let ids: Vec<i32> = (0..tokens * top_k).map(|_| random.range(0, experts) as i32).collect();
        let mut expected: Vec<usize> = (0..ids.len()).collect();
        expected.sort_by_key(|&pair| ids[pair]);
        let (mut offsets, mut rows, mut slots) = (vec![9; experts + 1], vec![9; ids.len()], vec![9; ids.len()]);
        dispatch_experts(&ids, top_k, &mut offsets, &mut rows, &mut slots).unwrap();
        for (expert, &offset) in offsets.iter().enumerate() {
            assert_eq!(offset as usize, ids.iter().filter(|&&id| (id as usize) < expert).count());
        }
        for (row, &pair) in expected.iter().enumerate() {
            assert_eq!(rows[row] as usize, pair / top_k);
            assert_eq!(slots[pair] as usize, row);
        }
    }
}

#[test]
fn refuses_ids_that_name_no_expert() {
    for bad in [-1, 3, i32::MAX, i32::MIN] {
        let error = dispatch_experts(&[0, 2, 1, bad], 2, &mut [0; 4], &mut [0; 4], &mut [0; 4]);
        assert!(matches!(error, Err(KernelError::Index { what: "ids", index: 3, low: 0, high: 3, .. })));
    }
    assert!(dispatch_experts(&[0, 1, 2], 2, &mut [0; 4], &mut [0; 3], &mut [0; 3]).is_err());
    assert!(dispatch_experts(&[0, 1], 0, &mut [0; 4], &mut [0; 2], &mut [0; 2]).is_err());
    assert!(dispatch_experts(&[], 1, &mut [], &mut [], &mut []).is_err());
}

#[test]
fn combines_in_order_with_and_without_an_addend() {
    let mut random = Random::new(9);
    for (tokens, top_k, cols) in [(1, 1, 1), (3, 2, 20), (40, 8, 512)] {
        let x = random.values(tokens * top_k * cols, 1.0);
        let weights = random.values(tokens * top_k, 1.0);
        let addend = random.values(tokens * cols, 1.0);
        let mut slots: Vec<i32> = (0..(tokens * top_k) as i32).collect();
        random.shuffle(&mut slots);
        for with_addend in [false, true] {
            let expected: Vec<f64> = (0..tokens * cols)
                .map(|i| {
                    let (token, col) = (i / cols, i % cols);
                    let sum: f64 = (token * top_k..(token + 1) * top_k)
                        .map(|pair| f64::from(weights[pair]) * f64::from(x[slots[pair] as usize * cols + col]))
                        .sum();
                    sum + if with_addend { f64::from(addend[i]) } else { 0.0 }
                })
                .collect();
            let mut first: Option<Vec<u32>> = None;
            for isa in Isa::available() {
                let mut out = addend.clone();
                let view = MatrixMut::dense(&mut out, tokens, cols);
                // SAFETY: in place.
                let addend = unsafe { Matrix::from_raw(view.row_ptr(0), tokens, cols, cols) };
                combine(
                    isa,
                    &Threads(3),
                    Matrix::dense(&x, tokens * top_k, cols),
                    Matrix::dense(&slots, tokens, top_k),
                    Matrix::dense(&weights, tokens, top_k),
                    with_addend.then_some(addend),
                    view,
                )
                .unwrap();
                close(&out, &expected, 2e-6);
                assert_eq!(*first.get_or_insert_with(|| bits(&out)), bits(&out), "{}", isa.name());
            }
        }
    }
    let mut out = [0.0; 2];
    for bad in [-1, 2] {
        let slots = [0, bad];
        let result = combine(
            Isa::Scalar,
            &Serial,
            Matrix::dense(&[0.0; 4], 2, 2),
            Matrix::dense(&slots, 1, 2),
            Matrix::dense(&[1.0; 2], 1, 2),
            None,
            MatrixMut::dense(&mut out, 1, 2),
        );
        assert!(matches!(result, Err(KernelError::Index { index: 1, .. })));
    }
}

#[test]
fn gathers_rows_and_gives_zeros_outside() {
    let x: Vec<f32> = (0..12).map(|i| i as f32 + 1.0).collect();
    let mut out = vec![7.0; 15];
    let rows = [3, -1, 0, 4, i32::MIN];
    gather_rows(&Threads(2), Matrix::dense(&x, 4, 3), &rows, MatrixMut::dense(&mut out, 5, 3)).unwrap();
    assert_eq!(out[..3], [10.0, 11.0, 12.0]);
    assert_eq!(out[6..9], [1.0, 2.0, 3.0]);
    assert!(out[3..6].iter().chain(&out[9..]).all(|&x| x == 0.0));
}

#[test]
fn embeds_from_every_float_type_and_gives_zeros_outside() {
    let mut random = Random::new(10);
    let (rows, cols) = (5, 512);
    for dtype in DType::ALL {
        let row_bytes = dtype.bytes_for(cols as u64).unwrap() as usize;
        // Small bytes keep scales finite.
        let bytes: Vec<u8> = (0..rows * row_bytes).map(|_| random.range(0, 60) as u8).collect();
        let table = Table { dtype, bytes: &bytes, rows, cols, packed: None };
        let ids = [4, 0, 5, -1, 2];
        let mut out = vec![7.0; ids.len() * cols];
        let result = embed(&Threads(2), &ids, table, MatrixMut::dense(&mut out, ids.len(), cols));
        if !dtype.is_float() && !dtype.is_block_quantised() {
            assert!(matches!(result, Err(KernelError::Type { .. })), "{dtype}");
            continue;
        }
        result.unwrap();
        for (row, &id) in ids.iter().enumerate() {
            let mut expected = vec![0.0; cols];
            if let Some(bytes) = usize::try_from(id).ok().and_then(|id| bytes.chunks(row_bytes).nth(id)) {
                blocks::dequantize(dtype, bytes, &mut expected).unwrap();
            }
            assert_eq!(bits(&out[row * cols..][..cols]), bits(&expected), "{dtype}");
        }
        let short = Table { rows: rows + 1, ..table };
        assert!(embed(&Serial, &ids, short, MatrixMut::dense(&mut out, ids.len(), cols)).is_err());
    }
    let table = Table { dtype: DType::Q4_0, bytes: &[0; 18], rows: 1, cols: 33, packed: None };
    assert!(embed(&Serial, &[0], table, MatrixMut::dense(&mut [0.0; 33], 1, 33)).is_err());
}

#[test]
fn rows_of_a_packed_table_have_the_bits_of_the_files_rows() {
    let mut random = Random::new(11);
    let (rows, cols) = (37, 768);
    let (mut packed_types, ids) = (0, [36, 0, 15, 16, 31, 32, 37, -1, 17]);
    for dtype in DType::ALL {
        let Ok(layout) = WeightLayout::for_dtype(dtype, rows, cols, None) else { continue };
        if layout.packed_bytes() == 0 {
            continue;
        }
        packed_types += 1;
        // Of any sign; the second byte of a half-precision scale below 124 keeps it finite.
        let byte = |_| (random.range(0, 124) + 128 * random.range(0, 2)) as u8;
        let bytes: Vec<u8> = (0..layout.source_bytes()).map(byte).collect();
        let mut packed = vec![0; layout.packed_bytes()];
        layout.pack(&Serial, &bytes, &mut packed).unwrap();
        let stored = Table { dtype, bytes: &bytes, rows, cols, packed: None };
        let (mut expected, mut found) = (vec![7.0; ids.len() * cols], vec![8.0; ids.len() * cols]);
        embed(&Serial, &ids, stored, MatrixMut::dense(&mut expected, ids.len(), cols)).unwrap();
        let table = Table { bytes: &packed, packed: Some(layout), ..stored };
        embed(&Threads(2), &ids, table, MatrixMut::dense(&mut found, ids.len(), cols)).unwrap();
        assert_eq!(bits(&found), bits(&expected), "{dtype}");
        for wrong in
            [Table { rows: rows + 16, ..table }, Table { cols: cols / 2, ..table }, Table { bytes: &[], ..table }]
        {
            assert!(embed(&Serial, &ids, wrong, MatrixMut::dense(&mut found, ids.len(), cols)).is_err(), "{dtype}");
        }
    }
    assert!(packed_types >= 12, "{packed_types}");
}
