//! What the process has used.

/// Most memory that was resident at a time, where the system tells.
#[must_use]
pub fn peak_resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_memory() {
        let peak = peak_resident_bytes().unwrap();
        assert!(peak > 1 << 19, "{peak}");
    }
}
