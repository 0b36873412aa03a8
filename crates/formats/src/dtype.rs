//! Storage types: stable numeric codes, names, and the arithmetic of blocks.

use std::fmt;
use std::str::FromStr;

use crate::FormatError;

/// How the elements of a tensor are stored.
///
/// The numeric codes are stable: GGUF's own type ids where GGUF has one, and 100 upwards for the rest.
#[expect(non_camel_case_types, reason = "the field's own spelling: Q4_0 and Q4_K, not Q40 and Q4K")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32 = 0,
    /// IEEE binary16.
    F16 = 1,
    /// 32 values: f16 scale, 4-bit codes minus 8.
    Q4_0 = 2,
    /// 32 values: f16 scale and minimum, 4-bit codes.
    Q4_1 = 3,
    /// 32 values: f16 scale, 5-bit codes minus 16.
    Q5_0 = 6,
    /// 32 values: f16 scale and minimum, 5-bit codes.
    Q5_1 = 7,
    /// 32 values: f16 scale, signed 8-bit codes.
    Q8_0 = 8,
    /// 256 values: 2-bit codes, 4-bit scale and minimum per 16.
    Q2_K = 10,
    /// 256 values: 3-bit codes minus 4, 6-bit scale per 16.
    Q3_K = 11,
    /// 256 values: 4-bit codes, 6-bit scale and minimum per 32.
    Q4_K = 12,
    /// 256 values: 5-bit codes, 6-bit scale and minimum per 32.
    Q5_K = 13,
    /// 256 values: 6-bit codes minus 32, 8-bit scale per 16.
    Q6_K = 14,
    /// 32 values: f16 scale, 4-bit indices into a table of 16 levels.
    IQ4_NL = 20,
    /// 256 values: 4-bit indices into the table of `IQ4_NL`, 6-bit scale per 32.
    IQ4_XS = 23,
    /// Signed 8-bit integer.
    I8 = 24,
    /// Signed 16-bit integer.
    I16 = 25,
    /// Signed 32-bit integer.
    I32 = 26,
    /// Signed 64-bit integer.
    I64 = 27,
    /// IEEE binary64.
    F64 = 28,
    /// The upper half of binary32.
    BF16 = 30,
    /// 8-bit float, 4 exponent bits, finite ("fn"): maximum 448, no infinity, 0x7F and 0xFF are NaN.
    F8E4M3 = 100,
    /// 8-bit float, 5 exponent bits: the upper half of binary16.
    F8E5M2 = 101,
    /// Unsigned 8-bit integer.
    U8 = 102,
    /// One byte, 0 or 1.
    BOOL = 103,
}

/// `(type, name, values per block, bytes per block)`; the one place where a type's sizes are written down.
const TYPES: [(DType, &str, usize, usize); 24] = [
    (DType::F32, "f32", 1, 4),
    (DType::F16, "f16", 1, 2),
    (DType::Q4_0, "q4_0", 32, 18),
    (DType::Q4_1, "q4_1", 32, 20),
    (DType::Q5_0, "q5_0", 32, 22),
    (DType::Q5_1, "q5_1", 32, 24),
    (DType::Q8_0, "q8_0", 32, 34),
    (DType::Q2_K, "q2_k", 256, 84),
    (DType::Q3_K, "q3_k", 256, 110),
    (DType::Q4_K, "q4_k", 256, 144),
    (DType::Q5_K, "q5_k", 256, 176),
    (DType::Q6_K, "q6_k", 256, 210),
    (DType::IQ4_NL, "iq4_nl", 32, 18),
    (DType::IQ4_XS, "iq4_xs", 256, 136),
    (DType::I8, "i8", 1, 1),
    (DType::I16, "i16", 1, 2),
    (DType::I32, "i32", 1, 4),
    (DType::I64, "i64", 1, 8),
    (DType::F64, "f64", 1, 8),
    (DType::BF16, "bf16", 1, 2),
    (DType::F8E4M3, "f8_e4m3", 1, 1),
    (DType::F8E5M2, "f8_e5m2", 1, 1),
    (DType::U8, "u8", 1, 1),
    (DType::BOOL, "bool", 1, 1),
];

impl DType {
    /// Every type, in the order of the codes.
    pub const ALL: [Self; TYPES.len()] = {
        let mut all = [Self::F32; TYPES.len()];
        let mut i = 0;
        while i < all.len() {
            all[i] = TYPES[i].0;
            i += 1;
        }
        all
    };

    #[inline]
    const fn row(self) -> (&'static str, usize, usize) {
        // Kernels ask for sizes within their loops.
        static ROWS: [(&str, usize, usize); 256] = {
            // A test walks every variant. Zero-length blocks make any misuse an error, not a wrong size.
            let mut rows = [("unlisted", 1, 0); 256];
            let mut i = 0;
            while i < TYPES.len() {
                rows[TYPES[i].0 as usize] = (TYPES[i].1, TYPES[i].2, TYPES[i].3);
                i += 1;
            }
            rows
        };
        ROWS[self as usize & 255]
    }

    /// Stable numeric code.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// The type of a [`code`](Self::code).
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.code() == code)
    }

    /// Lower-case name, the one that [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        self.row().0
    }

    /// Values per block; 1 for plain types.
    #[inline]
    pub const fn block_len(self) -> usize {
        self.row().1
    }

    /// Bytes per block; the size of an element for plain types.
    #[inline]
    pub const fn block_bytes(self) -> usize {
        self.row().2
    }

    /// Values that share one scale: 32 or 16 for quantised types, 1 for plain ones.
    pub const fn group_len(self) -> usize {
        match self {
            Self::Q2_K | Self::Q3_K | Self::Q6_K => 16,
            _ if self.is_block_quantised() => 32,
            _ => 1,
        }
    }

    /// A plain floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F64 | Self::F32 | Self::F16 | Self::BF16 | Self::F8E4M3 | Self::F8E5M2)
    }

    /// A type that packs several values with shared scales into one block.
    pub const fn is_block_quantised(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of `elements` values, or `None` if they are not whole blocks or overflow.
    pub const fn bytes_for(self, elements: u64) -> Option<u64> {
        let block_len = self.block_len() as u64;
        if !elements.is_multiple_of(block_len) {
            return None;
        }
        (elements / block_len).checked_mul(self.block_bytes() as u64)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = FormatError;

    fn from_str(text: &str) -> Result<Self, FormatError> {
        Self::ALL
            .into_iter()
            .find(|dtype| dtype.name() == text)
            .ok_or_else(|| FormatError::UnknownType { found: crate::error::quote(text.as_bytes()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip_and_are_unique() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.name().parse::<DType>().ok(), Some(dtype));
            assert!(dtype.block_bytes() > 0);
            assert_eq!(dtype.block_len() % dtype.group_len(), 0);
        }
        assert_eq!(DType::from_code(9), None);
        assert!("Q4_0".parse::<DType>().is_err());
    }

    #[test]
    fn codes_are_the_published_ones() {
        let published = [(DType::Q4_0, 2), (DType::Q8_0, 8), (DType::Q2_K, 10), (DType::Q6_K, 14), (DType::IQ4_NL, 20)];
        for (dtype, code) in published {
            assert_eq!(dtype.code(), code);
        }
        assert_eq!(DType::IQ4_XS.code(), 23);
        assert_eq!(DType::BF16.code(), 30);
        assert_eq!(DType::F8E4M3.code(), 100);
        assert_eq!(DType::BOOL.code(), 103);
    }

    #[test]
    fn bytes_for_checks_blocks_and_overflow() {
        assert_eq!(DType::Q4_0.bytes_for(64), Some(36));
        assert_eq!(DType::Q4_0.bytes_for(33), None);
        assert_eq!(DType::Q6_K.bytes_for(512), Some(420));
        assert_eq!(DType::F32.bytes_for(u64::MAX), None);
        assert_eq!(DType::Q8_0.bytes_for(u64::MAX - 31), None);
        assert_eq!(DType::U8.bytes_for(u64::MAX), Some(u64::MAX));
    }
}
