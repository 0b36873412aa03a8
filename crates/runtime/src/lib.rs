//! Memory pools, plan cache and executor: runs a lowered graph on a device.
