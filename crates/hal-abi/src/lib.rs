//! The C ABI between the runtime and a device plugin: plain data, constants, no code.
