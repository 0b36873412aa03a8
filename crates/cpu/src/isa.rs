//! Which instructions may be used. Probed once; `QWEN_CPU_ISA=scalar|avx2|avx512` lowers it, never raises it.

use std::sync::OnceLock;

/// A set of instructions that kernels are written for, in rising order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust.
    Scalar,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ, VNNI (and BF16 where [`has_avx512_bf16`] says so).
    Avx512,
}

impl Isa {
    /// What this processor has, lowered by the environment.
    #[must_use]
    pub fn current() -> Self {
        static CURRENT: OnceLock<Isa> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let limit = Self::limit().unwrap_or(Self::Avx512);
            Self::detect().min(limit)
        })
    }

    /// What `QWEN_CPU_ISA` allows.
    ///
    /// # Errors
    /// With its text, if that names no set.
    pub fn limit() -> Result<Self, String> {
        let text = std::env::var_os("QWEN_CPU_ISA").unwrap_or_default();
        Self::named(&text.to_string_lossy())
    }

    fn named(text: &str) -> Result<Self, String> {
        match text {
            "scalar" => Ok(Self::Scalar),
            "avx2" => Ok(Self::Avx2),
            "avx512" | "" => Ok(Self::Avx512),
            other => Err(other.to_owned()),
        }
    }

    /// Every set that this processor has, for tests.
    #[must_use]
    pub fn available() -> Vec<Self> {
        [Self::Scalar, Self::Avx2, Self::Avx512].into_iter().filter(|isa| *isa <= Self::detect()).collect()
    }

    /// The set itself, or the highest one that this processor has, if that is lower.
    #[must_use]
    pub fn supported(self) -> Self {
        self.min(Self::detect())
    }

    /// Name as in `QWEN_CPU_ISA`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn detect() -> Self {
        let avx2 =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        let avx512 = avx2
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vnni");
        if avx512 {
            Self::Avx512
        } else if avx2 {
            Self::Avx2
        } else {
            Self::Scalar
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn detect() -> Self {
        Self::Scalar
    }
}

/// Whether the processor multiplies bfloat16 pairs (and the environment allows AVX-512).
#[must_use]
pub fn has_avx512_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        Isa::current() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_exactly() {
        for isa in [Isa::Scalar, Isa::Avx2, Isa::Avx512] {
            assert_eq!(Isa::named(isa.name()), Ok(isa));
        }
        assert_eq!(Isa::named(""), Ok(Isa::Avx512));
        assert_eq!(Isa::named("AVX2"), Err("AVX2".to_owned()));
    }
}
