//! Handles. What crosses the boundary is a number that no address can be mistaken for: whoever follows it crashes, and whoever
//! uses one of another plugin, or one that was given back, is told so.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use qwen_hal_plugin::Failure;

/// No user-space address begins like this.
const MARK: usize = 0x5100_0000_0000_0000;

static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Objects of one kind by handle.
pub(crate) struct Registry<T> {
    what: &'static str,
    objects: LazyLock<RwLock<HashMap<usize, Arc<T>>>>,
}

impl<T> Registry<T> {
    pub(crate) const fn new(what: &'static str) -> Self {
        Self { what, objects: LazyLock::new(RwLock::default) }
    }

    pub(crate) fn insert<H>(&self, object: Arc<T>) -> *mut H {
        let handle = MARK | NEXT.fetch_add(1, Ordering::Relaxed) << 4;
        self.objects.write().unwrap_or_else(PoisonError::into_inner).insert(handle, object);
        std::ptr::without_provenance_mut(handle)
    }

    pub(crate) fn get<H>(&self, handle: *mut H) -> Result<Arc<T>, Failure> {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.get(&handle.addr()).cloned().ok_or_else(|| self.refuse(handle.addr()))
    }

    pub(crate) fn remove<H>(&self, handle: *mut H) -> Result<Arc<T>, Failure> {
        let mut objects = self.objects.write().unwrap_or_else(PoisonError::into_inner);
        objects.remove(&handle.addr()).ok_or_else(|| self.refuse(handle.addr()))
    }

    fn refuse(&self, handle: usize) -> Failure {
        let what = self.what;
        Failure::invalid(match handle {
            0 => format!("no {what}, expected one"),
            handle if handle & MARK == MARK => format!("handle {handle:#x} is no {what}, or one that was given back"),
            handle => format!("{handle:#x} is an address, expected the handle of a {what} of this plugin"),
        })
    }
}
