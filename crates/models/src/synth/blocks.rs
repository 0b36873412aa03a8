//! Random values in any storage type: random codes, and scales that give the values the spread asked for.

use half::{bf16, f16};
use qwen_formats::DType;

/// Random bytes: xorshift, eight at a time.
#[derive(Debug, Clone)]
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        // Zero would stay zero.
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) const fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.word().to_le_bytes()[..chunk.len()]);
        }
    }

    /// Uniform with mean 0 and so much standard deviation.
    pub(super) fn value(&mut self, deviation: f32) -> f32 {
        let unit = (self.word() >> 40) as f32 / (1 << 23) as f32 - 1.0;
        unit * deviation * 3.0_f32.sqrt()
    }
}

/// Where a block has its scale, and by how much random codes of it vary at scale 1.
struct Layout {
    scale_at: usize,
    deviation: f32,
    /// Where it has its minimum, and how many scales below zero codes are to begin (as the format signs it).
    minimum: Option<(usize, f32)>,
}

const fn layout(scale_at: usize, deviation: f32) -> Layout {
    Layout { scale_at, deviation, minimum: None }
}

/// Of block formats; codes are uniform, so the spread follows from the format. `None` for plain types.
const fn layout_of(dtype: DType) -> Option<Layout> {
    Some(match dtype {
        DType::Q4_0 => layout(0, 4.61),
        DType::Q4_1 => Layout { minimum: Some((2, -7.5)), ..layout(0, 4.61) },
        DType::Q5_0 => layout(0, 9.23),
        DType::Q5_1 => Layout { minimum: Some((2, -15.5)), ..layout(0, 9.23) },
        DType::Q8_0 => layout(0, 73.9),
        DType::Q2_K => Layout { minimum: Some((82, 1.5)), ..layout(80, 13.9) },
        DType::Q3_K => layout(108, 43.4),
        DType::Q4_K => Layout { minimum: Some((2, 7.5)), ..layout(0, 255.0) },
        DType::Q5_K => Layout { minimum: Some((2, 15.5)), ..layout(0, 521.0) },
        DType::Q6_K => layout(208, 1367.0),
        DType::IQ4_NL => layout(0, 70.0),
        DType::IQ4_XS => layout(0, 18.5 * 70.0),
        _ => return None,
    })
}

/// Whether [`fill`] knows the type.
#[cfg(test)]
pub(super) const fn can_fill(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16) || layout_of(dtype).is_some()
}

/// Whole blocks of values with mean 0 (nearly) and standard deviation `deviation`.
pub(super) fn fill(dtype: DType, bytes: &mut [u8], deviation: f32, random: &mut Random) {
    let Some(layout) = layout_of(dtype) else {
        let size = dtype.block_bytes();
        for value in bytes.chunks_exact_mut(size) {
            let x = random.value(deviation);
            match dtype {
                DType::F16 => value.copy_from_slice(&f16::from_f32(x).to_le_bytes()),
                DType::BF16 => value.copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
                _ => value.copy_from_slice(&x.to_le_bytes()),
            }
        }
        return;
    };
    random.fill(bytes);
    let scale = f16::from_f32(deviation / layout.deviation);
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        block[layout.scale_at..layout.scale_at + 2].copy_from_slice(&scale.to_le_bytes());
        if let Some((at, steps)) = layout.minimum {
            block[at..at + 2].copy_from_slice(&f16::from_f32(scale.to_f32() * steps).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_spread_asked_for() {
        for dtype in DType::ALL.into_iter().filter(|dtype| can_fill(*dtype)) {
            for deviation in [0.02_f32, 1.0] {
                let blocks = 1 << 16 >> (dtype.block_len().ilog2());
                let mut bytes = vec![0; blocks * dtype.block_bytes()];
                fill(dtype, &mut bytes, deviation, &mut Random::new(7));
                let mut values = vec![0.0; blocks * dtype.block_len()];
                qwen_formats::blocks::dequantize(dtype, &bytes, &mut values).unwrap();
                let n = values.len() as f64;
                let mean = values.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
                let spread = (values.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n).sqrt();
                let (mean, spread) = (mean / f64::from(deviation), spread / f64::from(deviation));
                assert!((0.9..1.1).contains(&spread) && mean.abs() < 0.15, "{dtype}: {spread} {mean}");
            }
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_bytes() {
        let bytes = |seed| {
            let mut bytes = [0; 36];
            fill(DType::Q4_0, &mut bytes, 1.0, &mut Random::new(seed));
            bytes
        };
        assert_eq!(bytes(1), bytes(1));
        assert_ne!(bytes(1), bytes(2));
    }
}
