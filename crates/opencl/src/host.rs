//! What the host lends: its log.

use std::sync::OnceLock;

use qwen_hal_abi::{qhal_host_api, qhal_str};

struct Host(&'static qhal_host_api);
// SAFETY: the table is constant, and its functions may be called from any thread.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

static HOST: OnceLock<Host> = OnceLock::new();

/// Levels of the host's log.
const WARNING: u32 = 2;
const INFO: u32 = 3;

/// Remembers the first host.
///
/// # Safety
/// `host` is null or a table that stays valid for the life of the process.
pub(crate) unsafe fn adopt(host: *const qhal_host_api) {
    // SAFETY: by the caller's promise.
    let host = unsafe { host.as_ref() };
    if let Some(host) = host.filter(|host| host.struct_size as usize >= size_of::<qhal_host_api>()) {
        HOST.get_or_init(|| Host(host));
    }
}

fn log(level: u32, message: &str) {
    let str = |text: &str| qhal_str { data: text.as_ptr(), len: text.len() as u64 };
    if let Some((host, log)) = HOST.get().and_then(|host| Some((host.0, host.0.log?))) {
        // SAFETY: the host's own context, and strings that live for the call.
        unsafe { log(host.context, level, str("opencl"), str(message)) };
    }
}

/// Something that works, though not as it should.
pub(crate) fn warn(message: &str) {
    log(WARNING, message);
}
/// Something worth knowing.
pub(crate) fn info(message: &str) {
    log(INFO, message);
}
