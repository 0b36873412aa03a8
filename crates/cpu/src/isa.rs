//! Which instructions may be used. Probed once; `QWEN_CPU_ISA=scalar|neon|avx2|avx512|amx` lowers it, never raises it.

use std::sync::OnceLock;

/// A set of instructions that kernels are written for, in rising order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Portable Rust.
    Scalar,
    /// NEON, on aarch64 alone; dot products and matrix products of int8 where [`has_neon_dot`] and [`has_neon_i8mm`] say so.
    /// UNTESTED on hardware.
    Neon,
    /// AVX2, FMA, F16C.
    Avx2,
    /// AVX-512 F, BW, VL, DQ, VNNI (and BF16 where [`has_avx512_bf16`] says so).
    Avx512,
    /// AVX-512 and AMX for int8, which the system lets this process use. One-row products ask for memory ahead: processors
    /// with AMX gain by it, others were measured to lose.
    Amx,
}

impl Isa {
    /// What this processor has, lowered by the environment.
    #[must_use]
    pub fn current() -> Self {
        static CURRENT: OnceLock<Isa> = OnceLock::new();
        *CURRENT.get_or_init(|| {
            let limit = Self::limit().unwrap_or(Self::Amx);
            limit.supported()
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
            "neon" => Ok(Self::Neon),
            "avx2" => Ok(Self::Avx2),
            "avx512" => Ok(Self::Avx512),
            "amx" | "" => Ok(Self::Amx),
            other => Err(other.to_owned()),
        }
    }

    /// Every set that this processor has, for tests.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let all = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512, Self::Amx];
        all.into_iter().filter(|isa| isa.supported() == *isa).collect()
    }

    /// The set itself, or the highest one that this processor has, if that is lower.
    #[must_use]
    pub fn supported(self) -> Self {
        match self.min(Self::detect()) {
            Self::Neon if !cfg!(target_arch = "aarch64") => Self::Scalar,
            isa => isa,
        }
    }

    /// Name as in `QWEN_CPU_ISA`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
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
        if avx512 && amx::usable() {
            Self::Amx
        } else if avx512 {
            Self::Avx512
        } else if avx2 {
            Self::Avx2
        } else {
            Self::Scalar
        }
    }

    #[cfg(target_arch = "aarch64")]
    const fn detect() -> Self {
        Self::Neon
    }

    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const fn detect() -> Self {
        Self::Scalar
    }
}

/// Bytes ahead that a stream of memory is asked for on processors with [`Isa::Amx`].
#[cfg(target_arch = "x86_64")]
pub(crate) const AHEAD: usize = 4096;

/// Whether the processor multiplies bfloat16 pairs (and the environment allows AVX-512).
#[must_use]
pub fn has_avx512_bf16() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        Isa::current() >= Isa::Avx512 && is_x86_feature_detected!("avx512bf16")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether the processor looks bytes up in tables of 128 (and the environment allows AVX-512).
#[must_use]
pub fn has_avx512_vbmi() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        Isa::current() >= Isa::Avx512 && is_x86_feature_detected!("avx512vbmi")
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        false
    }
}

/// Whether the processor is a 64-bit Arm with dot products of int8, whatever the environment allows.
#[must_use]
pub fn has_neon_dot() -> bool {
    #[cfg(target_arch = "aarch64")]
    {
        std::arch::is_aarch64_feature_detected!("dotprod")
    }
    #[cfg(not(target_arch = "aarch64"))]
    {
        false
    }
}

/// Whether it has dot products and matrix products of int8.
#[must_use]
pub fn has_neon_i8mm() -> bool {
    #[cfg(target_arch = "aarch64")]
    {
        has_neon_dot() && std::arch::is_aarch64_feature_detected!("i8mm")
    }
    #[cfg(not(target_arch = "aarch64"))]
    {
        false
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod amx {
    use std::arch::x86_64::__cpuid_count;
    use std::sync::OnceLock;

    /// Whether the processor has AMX for int8 and the system gave its registers to this process. Linux gives them on request,
    /// once, to all threads.
    pub(super) fn usable() -> bool {
        static USABLE: OnceLock<bool> = OnceLock::new();
        *USABLE.get_or_init(|| {
            const TILE_AND_INT8: u32 = 1 << 24 | 1 << 25;
            __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).edx & TILE_AND_INT8 == TILE_AND_INT8 && requested()
        })
    }

    fn requested() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const TILE_DATA: i64 = 18;
        unsafe extern "C" {
            fn syscall(number: i64, ...) -> i64;
        }
        // SAFETY: the call takes two numbers, touches no memory of ours, and fails on systems that don't know it.
        unsafe { syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0 }
    }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
mod amx {
    /// Not asked for on other systems.
    pub(super) const fn usable() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_named_exactly() {
        for isa in [Isa::Scalar, Isa::Neon, Isa::Avx2, Isa::Avx512, Isa::Amx] {
            assert_eq!(Isa::named(isa.name()), Ok(isa));
        }
        assert_eq!(Isa::named(""), Ok(Isa::Amx));
        assert_eq!(Isa::named("AVX2"), Err("AVX2".to_owned()));
    }

    #[test]
    fn a_set_of_another_architecture_is_never_used() {
        let best = if cfg!(target_arch = "aarch64") { Isa::Neon } else { Isa::Scalar };
        assert_eq!(Isa::Neon.supported(), best);
        assert_eq!(Isa::available().contains(&Isa::Neon), cfg!(target_arch = "aarch64"));
        assert_eq!(Isa::available().contains(&Isa::Avx2), Isa::Avx2.supported() == Isa::Avx2);
    }
}
