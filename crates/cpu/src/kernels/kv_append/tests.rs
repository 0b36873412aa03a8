use super::*;
use crate::kernels::testing::{Random, Threads};
use crate::parallel::Serial;
use qwen_formats::{DType, blocks};

fn read(cache: &[u8], dtype: DType, index: usize) -> f32 {
    let mut value = [0.0];
    let size = dtype.block_bytes();
    blocks::dequantize(dtype, &cache[index * size..][..size], &mut value).unwrap();
    value[0]
}

#[test]
fn every_value_lands_in_its_place_and_nothing_else_changes() {
    let mut random = Random::new(11);
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (heads, head_dim, value_dim, block_size, joined, tokens) in [
            (1, 8, 8, 4, false, 5),
            (3, 64, 64, 16, false, 40),
            (2, 12, 20, 8, false, 9),
            (1, 32, 8, 16, true, 30),
            (2, 30, 48, 32, false, 50),
            (4, 128, 128, 16, false, 100),
        ] {
            let args = KvAppendArgs { num_key_value_heads: heads, head_dim, value_dim, block_size, joined };
            let pairs = !joined && in_pairs(dtype, block_size, head_dim, value_dim);
            let values = block_size * heads * (head_dim + value_dim);
            let (blocks, block_bytes) = (12, values * dtype.block_bytes() + 8);
            let (k, v) =
                (random.values(tokens * heads * head_dim, 2.0), random.values(tokens * heads * value_dim, 2.0));
            let mut slots: Vec<i32> = (0..(blocks * block_size) as i32).collect();
            random.shuffle(&mut slots);
            slots.truncate(tokens);
            slots.resize(tokens, -1);
            slots[2] = -7;
            for isa in Isa::available() {
                let before = vec![0x5a; blocks * block_bytes];
                let mut cache = before.clone();
                kv_append(
                    isa,
                    &Threads(2),
                    &args,
                    Matrix::dense(&k, tokens, heads * head_dim),
                    Matrix::dense(&v, tokens, heads * value_dim),
                    &slots,
                    CacheViewMut::new(&mut cache, dtype, block_bytes),
                )
                .unwrap();
                let mut expected = before;
                for (token, &slot) in slots.iter().enumerate() {
                    let Ok(slot) = usize::try_from(slot) else { continue };
                    let (block, index) = (slot / block_size, slot % block_size);
                    let bytes = &mut expected[block * block_bytes..][..block_bytes];
                    let mut put = |place: usize, x: f32| {
                        let size = dtype.block_bytes();
                        let target = &mut bytes[place * size..][..size];
                        match dtype {
                            DType::F32 => target.copy_from_slice(&x.to_le_bytes()),
                            DType::F16 => target.copy_from_slice(&crate::kernels::math::f32_to_f16(x).to_le_bytes()),
                            _ => target.copy_from_slice(&crate::kernels::math::f32_to_bf16(x).to_le_bytes()),
                        }
                    };
                    for head in 0..heads {
                        for i in 0..head_dim {
                            let place = if joined {
                                index * (head_dim + value_dim) + i
                            } else if pairs {
                                // Sixteen positions: [head_dim / 2][16][2].
                                let group = head * block_size * head_dim + index / 16 * 16 * head_dim;
                                group + i / 2 * 32 + index % 16 * 2 + i % 2
                            } else {
                                (head * block_size + index) * head_dim + i
                            };
                            put(place, k[(token * heads + head) * head_dim + i]);
                        }
                        for i in 0..value_dim {
                            let place = if joined {
                                index * (head_dim + value_dim) + head_dim + i
                            } else if pairs {
                                // [8][value_dim][2].
                                let group = head * block_size * value_dim + index / 16 * 16 * value_dim;
                                let at = group + index % 16 / 2 * 2 * value_dim + i * 2 + index % 2;
                                heads * block_size * head_dim + at
                            } else {
                                heads * block_size * head_dim + (head * block_size + index) * value_dim + i
                            };
                            put(place, v[(token * heads + head) * value_dim + i]);
                        }
                    }
                }
                assert!(cache == expected, "{dtype} {args:?} {}", isa.name());
            }
        }
    }
}

#[test]
fn the_last_of_equal_slots_wins() {
    let args = KvAppendArgs { num_key_value_heads: 1, head_dim: 1, value_dim: 1, block_size: 2, joined: false };
    let mut cache = vec![0; 16];
    let (k, v) = ([1.0, 2.0], [3.0, 4.0]);
    let view = CacheViewMut::new(&mut cache, DType::F32, 16);
    kv_append(Isa::current(), &Serial, &args, Matrix::dense(&k, 2, 1), Matrix::dense(&v, 2, 1), &[1, 1], view).unwrap();
    assert_eq!([1, 3].map(|i| read(&cache, DType::F32, i)), [2.0, 4.0]);
}

#[test]
fn refuses_slots_and_blocks_that_do_not_fit() {
    let args = KvAppendArgs { num_key_value_heads: 1, head_dim: 2, value_dim: 2, block_size: 2, joined: false };
    let x = [0.0; 4];
    let run = |slot: i32, block_bytes: usize, dtype: DType| {
        let mut cache = vec![0; 2 * block_bytes];
        let view = CacheViewMut::new(&mut cache, dtype, block_bytes);
        kv_append(Isa::Scalar, &Serial, &args, Matrix::dense(&x, 2, 2), Matrix::dense(&x, 2, 2), &[0, slot], view)
    };
    assert!(run(3, 32, DType::F32).is_ok());
    assert!(matches!(run(4, 32, DType::F32), Err(KernelError::Index { what: "slots", index: 1, high: 4, .. })));
    assert!(run(i32::MAX, 32, DType::F32).is_err());
    assert!(matches!(run(0, 31, DType::F32), Err(KernelError::Shape { expected: 32, found: 31, .. })));
    assert!(matches!(run(0, 32, DType::Q8_0), Err(KernelError::Type { .. })));
}
