//! One folder an op: `mod.rs` (contract, dispatch), `scalar.rs` (readable, the reference), `avx2.rs`, `avx512.rs`.
