//! One folder an op. Kernels of one body are generic over [`simd::Simd`] and compiled per instruction set, arrays of lanes being
//! the scalar twin; those that need other instructions have a file per set: `scalar.rs`, `avx2.rs`, `avx512.rs`.

pub mod attention;
pub mod cache;
pub mod dispatch;
pub mod elementwise;
pub mod error;
pub mod gemm;
pub mod kv_append;
pub mod math;
pub mod mla;
pub mod norm;
pub mod rope;
pub mod route;
mod rows;
pub mod simd;
pub mod softmax;
#[cfg(test)]
mod testing;
