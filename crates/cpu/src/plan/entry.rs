//! The table's functions for ops and plans.

use std::hash::{Hash, Hasher};
use std::sync::OnceLock;

use qwen_hal_abi::{
    QHAL_ERROR_STICKY, QHAL_INTERNAL, QHAL_PLAN_NEEDS_PREPACK, QHAL_SUPPORT_NATIVE, QHAL_SUPPORT_NO,
    QHAL_UNIMPLEMENTED, qhal_device, qhal_error, qhal_launch_args, qhal_op_desc, qhal_plan, qhal_plan_info,
    qhal_plan_opts, qhal_slice, qhal_str, qhal_stream, qhal_support, qhal_variant, qhal_variants_api,
};
use qwen_hal_plugin::{variant_named, write_variant};

use super::desc::Desc;
use super::launch::Launch;
use super::variants::Variant;
use super::{FLAGS, Op, Plan};
use crate::api::{Device, Failure, LINE, Stream, buffer_of_slice, caught, guard, sized, write_text};
use crate::kernels::gemm::Way;
use crate::parallel::Parallel;

unsafe fn plan_of<'a>(plan: *mut qhal_plan) -> Result<&'a Plan, Failure> {
    // SAFETY: the host passes null or a living plan of ours.
    unsafe { plan.cast::<Plan>().as_ref() }.ok_or_else(|| Failure::invalid("no plan, expected one"))
}

pub(crate) unsafe extern "C" fn op_supports(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    out: *mut qhal_support,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes an open device, a description, and a record of the size that it states.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let out = sized(out)?;
            (out.level, out.estimated_ns, out.estimated_bytes) = (QHAL_SUPPORT_NATIVE, 0.0, 0.0);
            out.reason.fill(0);
            match Op::parse(&Desc::new(desc)?, device.pool().threads(), device.isa.into()) {
                Ok(op) => {
                    let facts = op.facts();
                    out.estimated_bytes = facts.bytes_read + facts.bytes_written;
                    Ok(())
                }
                Err(failure) if failure.code == QHAL_UNIMPLEMENTED => {
                    out.level = QHAL_SUPPORT_NO;
                    write_text(&mut out.reason, &failure.message);
                    Ok(())
                }
                Err(failure) => Err(failure),
            }
        })
    }
}

pub(crate) unsafe extern "C" fn create(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: as `op_supports`.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            create_by(device, desc, opts, device.isa.into(), out, info)
        })
    }
}

/// A plan that computes in a way.
///
/// # Safety
/// A description, null or wishes, room for a plan, and a record of the size that it states.
unsafe fn create_by(
    device: &Device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    way: Way,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    unsafe {
        let op = Op::parse(&Desc::new(desc)?, device.pool().threads(), way)?;
        let plan = Plan { op, way, variants: OnceLock::new() };
        let mut answer = describe(&plan);
        if let Some(opts) = opts.as_ref() {
            check_wishes(&answer, opts)?;
        }
        let info = sized(info)?;
        answer.struct_size = info.struct_size;
        *info = answer;
        *out = Box::into_raw(Box::new(plan)).cast();
        Ok(())
    }
}

unsafe extern "C" fn create_as(
    device: *mut qhal_device,
    desc: *const qhal_op_desc,
    opts: *const qhal_plan_opts,
    name: qhal_str,
    out: *mut *mut qhal_plan,
    info: *mut qhal_plan_info,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: as `create`; the name is readable.
    unsafe {
        guard(err, || {
            let device = Device::of(device)?;
            let way = variant_named(Way::all(device.isa), |way| way.name(), name)?;
            create_by(device, desc, opts, way, out, info)
        })
    }
}

unsafe extern "C" fn variant(plan: *mut qhal_plan, index: u32, out: *mut qhal_variant, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a plan of ours and a record of the size that it states.
    unsafe { guard(err, || write_variant(plan_of(plan)?.variants(), index, Variant::record, out)) }
}

/// The `variants` extension.
pub(crate) static VARIANTS: qhal_variants_api = qhal_variants_api {
    struct_size: size_of::<qhal_variants_api>() as u32,
    version: 1,
    plan_variant: Some(variant),
    plan_create_as: Some(create_as),
};

fn check_wishes(info: &qhal_plan_info, opts: &qhal_plan_opts) -> Result<(), Failure> {
    let missing = opts.required_flags & !info.flags;
    if missing != 0 {
        return Err(Failure::unsupported(format!(
            "plan flags {missing:#x} are required, the plan has {:#x}",
            info.flags
        )));
    }
    if opts.max_workspace != 0 && info.workspace_bytes > opts.max_workspace {
        let (have, limit) = (info.workspace_bytes, opts.max_workspace);
        return Err(Failure::unsupported(format!("{have} bytes of workspace are needed, at most {limit} are allowed")));
    }
    Ok(())
}

fn describe(plan: &Plan) -> qhal_plan_info {
    let facts = plan.op.facts();
    let needs_prepack = facts.packed.iter().any(|(bytes, _)| *bytes > 0);
    let mut kernel = [0; 64];
    let name = format!("{}.{}", facts.kernel, plan.way.isa.name());
    write_text(&mut kernel, &name);
    let mut hasher = std::hash::DefaultHasher::new();
    format!("{:?}{:?}", plan.op, plan.way.isa).hash(&mut hasher);
    qhal_plan_info {
        struct_size: size_of::<qhal_plan_info>() as u32,
        flags: FLAGS | if needs_prepack { QHAL_PLAN_NEEDS_PREPACK } else { 0 },
        in_place: facts.in_place,
        workspace_bytes: facts.workspace_bytes as u64,
        workspace_alignment: LINE as u64,
        packed_bytes: facts.packed.map(|(bytes, _)| bytes as u64),
        packed_layout: facts.packed.map(|(_, layout)| layout),
        flops: facts.flops,
        bytes_read: facts.bytes_read,
        bytes_written: facts.bytes_written,
        kernel,
        content_hash: hasher.finish(),
    }
}

/// Runs work of a stream: refused while the stream has failed, and a failure in the middle of the work becomes the stream's.
fn on_stream(stream: &Stream, work: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    stream.check()?;
    match caught(work) {
        Err(failure) if failure.code == QHAL_INTERNAL || failure.flags & QHAL_ERROR_STICKY != 0 => {
            Err(stream.stick(failure))
        }
        result => result,
    }
}

pub(crate) unsafe extern "C" fn prepack(
    plan: *mut qhal_plan,
    stream: *mut qhal_stream,
    input: u32,
    src: qhal_slice,
    dst: qhal_slice,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a plan and a stream of ours and living buffers that nobody else uses meanwhile.
    unsafe {
        guard(err, || {
            let (plan, stream) = (plan_of(plan)?, Stream::of(stream)?);
            on_stream(stream, || {
                let (source_bytes, packed_bytes) = plan.op.packing(input as usize)?;
                let source = buffer_of_slice(&src)?.range(src.offset, source_bytes as u64, false)?;
                let target = buffer_of_slice(&dst)?.range(dst.offset, packed_bytes as u64, true)?;
                if src.size < source_bytes as u64 || dst.size < packed_bytes as u64 {
                    return Err(Failure::out_of_range(format!(
                        "{} bytes into {}, expected {source_bytes} into {packed_bytes}",
                        src.size, dst.size
                    )));
                }
                let source = std::slice::from_raw_parts(source.as_ptr(), source_bytes);
                let target = std::slice::from_raw_parts_mut(target.as_ptr(), packed_bytes);
                plan.op.pack(input as usize, &stream.pool, source, target)
            })
        })
    }
}

/// # Safety
/// Arguments with arrays of the stated lengths, and living buffers that nobody else uses meanwhile.
unsafe fn run(plan: &Plan, args: *const qhal_launch_args, stream: &Stream) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    plan.op.launch(&unsafe { Launch::new(args, plan.way, &stream.pool) }?)
}

/// Refuses a handle that is none.
///
/// # Safety
/// The handle is null or alive.
pub(crate) unsafe fn check(plan: *mut qhal_plan) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    unsafe { plan_of(plan) }.map(drop)
}

/// Computes a command of a list.
///
/// # Safety
/// As [`launch`].
pub(crate) unsafe fn compute(plan: *mut qhal_plan, args: &qhal_launch_args, stream: &Stream) -> Result<(), Failure> {
    // SAFETY: by the caller's promise.
    unsafe { run(plan_of(plan)?, args, stream) }
}

pub(crate) unsafe extern "C" fn launch(
    plan: *mut qhal_plan,
    stream: *mut qhal_stream,
    args: *const qhal_launch_args,
    err: *mut qhal_error,
) -> i32 {
    // SAFETY: the host passes a plan and a stream of ours, arguments, and living buffers that nobody else uses meanwhile.
    unsafe {
        guard(err, || {
            let (plan, stream) = (plan_of(plan)?, Stream::of(stream)?);
            on_stream(stream, || run(plan, args, stream))
        })
    }
}

pub(crate) unsafe extern "C" fn destroy(plan: *mut qhal_plan, err: *mut qhal_error) -> i32 {
    // SAFETY: the host passes a plan of ours, once.
    unsafe {
        guard(err, || {
            if !plan.is_null() {
                drop(Box::from_raw(plan.cast::<Plan>()));
            }
            Ok(())
        })
    }
}
