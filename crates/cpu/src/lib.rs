//! The CPU backend: kernels behind the same C ABI that every plugin speaks.
