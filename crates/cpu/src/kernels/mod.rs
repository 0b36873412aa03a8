//! One folder an op. Kernels of one body are generic over [`simd::Simd`] and compiled per instruction set, arrays of lanes being
//! the scalar twin; those that need other instructions have a file per set: `scalar.rs`, `avx2.rs`, `avx512.rs`.

pub mod error;
pub mod math;
pub mod simd;
