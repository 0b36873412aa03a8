//! The layout that plugins are compiled against: every struct's size and alignment, every field's offset, kept in
//! `layout.txt`. A difference breaks plugins that exist. Fields that were added at the end of a growable struct are the
//! only change that the same major version allows.
#![cfg(target_pointer_width = "64")]

use std::fmt::Write;

use qwen_hal_abi::*;

/// One line a struct, one a field. A field that is not listed does not compile.
macro_rules! layout {
    ($($name:ident { $($field:ident),+ $(,)? })+) => {{
        let mut text = String::new();
        $({
            let _every_field_is_listed = |value: &$name| {
                let $name { $($field: _),+ } = value;
            };
            let (size, align) = (size_of::<$name>(), align_of::<$name>());
            writeln!(text, "{} size {size} align {align}", stringify!($name)).unwrap();
            $(
                let offset = std::mem::offset_of!($name, $field);
                writeln!(text, "{offset:>6} {}", stringify!($field)).unwrap();
            )+
        })+
        text
    }};
}

#[test]
fn layout_is_the_published_one() {
    let layout = layout! {
        qhal_str { data, len }
        qhal_kv { key, value }
        qhal_attr { key, value_type, bits }
        qhal_slice { buffer, offset, size }
        qhal_error { struct_size, code, flags, op_index, vendor_code, message }
        qhal_manifest { struct_size, abi_major, abi_minor, min_host_minor, name, vendor, version, build_id, kind, sanitizer, cpu_features, score, reserved }
        qhal_device_id { struct_size, index, uuid, bus_address }
        qhal_device_info { struct_size, kind, id, name, fingerprint, driver, memory_total }
        qhal_dtype_caps { struct_size, dtype, bits, peak_source, peak_ops }
        qhal_device_caps { struct_size, kind, valid_fields, estimated_fields, memory_total, max_allocation, buffer_alignment, vmm_granularity, compute_units, vector_width, matrix_tile, numa_node, cache_bytes, scratch_bytes, features, bandwidth, bandwidth_source, num_dtypes, dtypes }
        qhal_health { struct_size, state, valid_fields, memory_free, memory_used, memory_reserved, utilisation, temperature, power, throttle_reasons, memory_errors_corrected, memory_errors_uncorrected, link_errors, heartbeat_ns, last_error }
        qhal_link { struct_size, class, flags, hops, bandwidth, latency_ns }
        qhal_buffer_desc { struct_size, memory, size, alignment, usage, scope, growth_hint, numa_node, reserved, name }
        qhal_import_desc { struct_size, kind, host, fd, peer, size, access, usage, name }
        qhal_stream_desc { struct_size, priority, name }
        qhal_copy_desc { struct_size, flags, dst, src, dst_host, src_host, row_bytes, rows, dst_pitch, src_pitch }
        qhal_tensor_desc { struct_size, dtype, rank, quant_scheme, dims, strides, dim_min, dim_max, dim_symbol, layout_id, flags, block }
        qhal_epilogue { struct_size, kind, input, param }
        qhal_op_desc { struct_size, op_kind, op_version, phase, compute, accumulate, tolerance, num_inputs, num_outputs, num_attrs, num_epilogues, num_symbols, inputs, outputs, attrs, epilogues, next }
        qhal_support { struct_size, level, estimated_ns, estimated_bytes, reason }
        qhal_plan_opts { struct_size, required_flags, max_workspace }
        qhal_plan_info { struct_size, flags, in_place, workspace_bytes, workspace_alignment, packed_bytes, packed_layout, flops, bytes_read, bytes_written, kernel, content_hash }
        qhal_launch_args { struct_size, num_inputs, num_outputs, num_symbols, inputs, outputs, workspace, symbol_values }
        qhal_host_api { struct_size, num_threads, context, log, host_alloc, host_free, parallel_for, tuning_get, tuning_put, trace_begin, trace_end, monotonic_ns, random_seed }
        qhal_plugin_api { struct_size, abi_minor, plugin_init, plugin_shutdown, device_count, device_info, device_open, device_close, device_caps, device_health, device_link, query_extension, buffer_alloc, buffer_import, buffer_free, buffer_map, buffer_unmap, stream_create, stream_destroy, stream_wait, copy, fill, event_create, event_destroy, event_record, stream_wait_event, event_wait, op_supports, plan_create, plan_prepack, plan_launch, plan_destroy }
        qhal_vmm_api { struct_size, version, reserve, commit, decommit }
        qhal_variant { struct_size, flags, symbol, reserved, min, max, family, tiling, name }
        qhal_variants_api { struct_size, version, plan_variant, plan_create_as }
        qhal_patch { struct_size, command, kind, index, slice, value }
        qhal_cmdlist_api { struct_size, version, begin, record_launch, record_copy, end, replay, destroy }
        qhal_comm_desc { struct_size, num_devices, devices, timeout_ns }
        qhal_collective_desc { struct_size, kind, dtype, reduction, peer, flags, count, src, dst }
        qhal_collectives_api { struct_size, version, comm_create, comm_destroy, supports, enqueue }
    };
    let published = include_str!("layout.txt");
    for (line, (found, expected)) in layout.lines().zip(published.lines()).enumerate() {
        assert_eq!(found, expected, "line {} of layout.txt", line + 1);
    }
    assert_eq!(
        layout.lines().count(),
        published.lines().count(),
        "structs or fields were added: add them to layout.txt"
    );
}
