//! The function table.

use qwen_hal_abi::{QHAL_ABI_MINOR, qhal_plugin_api};

use super::{buffer, device, stream};
use crate::plan::entry;

pub(super) static TABLE: qhal_plugin_api = qhal_plugin_api {
    struct_size: size_of::<qhal_plugin_api>() as u32,
    abi_minor: QHAL_ABI_MINOR,
    plugin_init: Some(device::init),
    plugin_shutdown: Some(device::shutdown),
    device_count: Some(device::count),
    device_info: Some(device::info),
    device_open: Some(device::open),
    device_close: Some(device::close),
    device_caps: Some(device::caps),
    device_health: Some(device::health),
    device_link: Some(device::link),
    query_extension: Some(device::extension),
    buffer_alloc: Some(buffer::alloc),
    buffer_import: Some(buffer::import),
    buffer_free: Some(buffer::free),
    buffer_map: Some(buffer::map),
    buffer_unmap: Some(buffer::unmap),
    stream_create: Some(stream::create),
    stream_destroy: Some(stream::destroy),
    stream_wait: Some(stream::wait),
    copy: Some(stream::copy),
    fill: Some(stream::fill),
    event_create: Some(stream::event_create),
    event_destroy: Some(stream::event_destroy),
    event_record: Some(stream::event_record),
    stream_wait_event: Some(stream::wait_event),
    event_wait: Some(stream::event_wait),
    op_supports: Some(entry::op_supports),
    plan_create: Some(entry::create),
    plan_prepack: Some(entry::prepack),
    plan_launch: Some(entry::launch),
    plan_destroy: Some(entry::destroy),
};
