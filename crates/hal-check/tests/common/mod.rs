//! Linked plugins as subjects.

use std::sync::Arc;

use qwen_hal::abi::LinkedPlugin;
use qwen_hal::{HalError, Host, Plugin, Pool};
use qwen_hal_check::Subject;

pub(crate) fn subject(plugin: &LinkedPlugin, threads: usize) -> Result<Subject, HalError> {
    let host = Host::new(Arc::new(Pool::new(Some(threads))));
    Subject::new(&Plugin::linked(plugin, &host)?, 0)
}
