//! Which storage type each tensor gets, as the usual quantiser chooses.

use qwen_formats::DType;

/// A mix of storage types under one name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mix {
    /// Name.
    pub name: &'static str,
    /// `general.file_type`.
    pub file_type: u32,
    /// Of most matrices.
    pub matrix: DType,
    /// Of the output head, or of the embedding where that is the head too.
    pub output: DType,
    /// Of value and down projections in some layers: the first and last eighth and every third between.
    pub more: DType,
}

const fn mix(name: &'static str, file_type: u32, matrix: DType, output: DType, more: DType) -> Mix {
    Mix { name, file_type, matrix, output, more }
}

/// All mixes.
pub static MIXES: [Mix; 17] = [
    mix("f32", 0, DType::F32, DType::F32, DType::F32),
    mix("f16", 1, DType::F16, DType::F16, DType::F16),
    mix("bf16", 32, DType::BF16, DType::BF16, DType::BF16),
    mix("q8_0", 7, DType::Q8_0, DType::Q8_0, DType::Q8_0),
    mix("q4_0", 2, DType::Q4_0, DType::Q6_K, DType::Q4_0),
    mix("q4_1", 3, DType::Q4_1, DType::Q6_K, DType::Q4_1),
    mix("q5_0", 8, DType::Q5_0, DType::Q6_K, DType::Q5_0),
    mix("q5_1", 9, DType::Q5_1, DType::Q6_K, DType::Q5_1),
    mix("q2_k", 10, DType::Q2_K, DType::Q6_K, DType::Q2_K),
    mix("q3_k", 11, DType::Q3_K, DType::Q6_K, DType::Q3_K),
    mix("q4_k", 14, DType::Q4_K, DType::Q6_K, DType::Q4_K),
    mix("q4_k_m", 15, DType::Q4_K, DType::Q6_K, DType::Q6_K),
    mix("q5_k", 16, DType::Q5_K, DType::Q6_K, DType::Q5_K),
    mix("q5_k_m", 17, DType::Q5_K, DType::Q6_K, DType::Q6_K),
    mix("q6_k", 18, DType::Q6_K, DType::Q6_K, DType::Q6_K),
    mix("iq4_nl", 25, DType::IQ4_NL, DType::Q6_K, DType::IQ4_NL),
    mix("iq4_xs", 30, DType::IQ4_XS, DType::Q6_K, DType::IQ4_XS),
];

impl Mix {
    /// Of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        MIXES.iter().find(|mix| mix.name == name)
    }

    /// Type of a value or down projection.
    pub(super) const fn of_sensitive(&self, layer: u32, layers: u32) -> DType {
        let eighth = layers / 8;
        let more = layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2;
        if more { self.more } else { self.matrix }
    }
}

/// A type like this one whose blocks make up rows of so many values.
pub(super) const fn fitting(dtype: DType, columns: u64) -> DType {
    if columns.is_multiple_of(dtype.block_len() as u64) {
        return dtype;
    }
    let smaller = match dtype {
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        DType::Q6_K => DType::Q8_0,
        DType::Q2_K | DType::Q3_K | DType::IQ4_XS => DType::IQ4_NL,
        _ => DType::F16,
    };
    if columns.is_multiple_of(smaller.block_len() as u64) { smaller } else { DType::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::blocks::can_fill;

    #[test]
    fn every_type_of_a_mix_can_be_filled() {
        for mix in &MIXES {
            assert!([mix.matrix, mix.output, mix.more].into_iter().all(can_fill), "{}", mix.name);
            assert_eq!(Mix::named(mix.name), Some(mix));
        }
        assert_eq!(Mix::named("Q4_0"), None);
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(fitting(DType::Q6_K, 1536), DType::Q6_K);
        assert_eq!(fitting(DType::Q6_K, 896), DType::Q8_0);
        assert_eq!(fitting(DType::Q4_K, 48), DType::F16);
    }

    #[test]
    fn more_bits_at_both_ends() {
        let mix = Mix::named("q4_k_m").unwrap();
        let more: Vec<u32> = (0..16).filter(|layer| mix.of_sensitive(*layer, 16) == DType::Q6_K).collect();
        assert_eq!(more, [0, 1, 4, 7, 10, 13, 14, 15]);
    }
}
