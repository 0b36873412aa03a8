//! Programs: sources put together from `kernels/*.cl` and options, built once a process, and kept on disk.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use opencl3::command_queue::{CommandQueue, enqueue_nd_range_kernel};
use opencl3::error_codes::CL_BUILD_PROGRAM_FAILURE;
use opencl3::kernel::{Kernel, create_kernel, set_kernel_arg};
use opencl3::program::{CL_PROGRAM_BINARIES, Program as ClProgram, get_program_info};
use opencl3::types::cl_mem;

use crate::cache::{Cache, Key};
use crate::failure::{Failure, reported};
use crate::stream::done;
use crate::unit::{Cut, Unit};

const COMMON: &str = include_str!("../kernels/common.cl");
const WEIGHTS: &str = include_str!("../kernels/weights.cl");
const VECTOR: &str = include_str!("../kernels/vector.cl");
const GEMM: &str = include_str!("../kernels/gemm.cl");
const EMBED: &str = include_str!("../kernels/embed.cl");
const ROWS: &str = include_str!("../kernels/rows.cl");
const ATTENTION: &str = include_str!("../kernels/attention.cl");
const EXPERTS: &str = include_str!("../kernels/experts.cl");

/// Every source.
#[cfg(test)]
pub(crate) const fn sources() -> [&'static str; 8] {
    [COMMON, WEIGHTS, VECTOR, GEMM, EMBED, ROWS, ATTENTION, EXPERTS]
}

/// Which program: its source, and what it is specialised for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Kernels {
    sources: &'static [&'static str],
    /// Numbers of rows that [`GEMM`] is included for.
    tiles: Vec<usize>,
    options: String,
}

impl Kernels {
    fn new(unit: &Unit, sources: &'static [&'static str], options: &str) -> Self {
        let options = format!("-cl-std=CL1.2 {} {options}", unit.facts.tiling.defines());
        #[cfg(test)]
        let options = crate::seeded::mark(options);
        Self { sources, tiles: Vec::new(), options: options.trim_end().to_owned() }
    }

    /// Ops on rows, and what is appended to the cache.
    pub(crate) fn rows(unit: &Unit) -> Self {
        Self::new(unit, &[ROWS], "")
    }
    /// Routing of experts.
    pub(crate) fn experts(unit: &Unit) -> Self {
        Self::new(unit, &[EXPERTS], "")
    }
    /// Attention with the sizes and types of the options.
    pub(crate) fn attention(unit: &Unit, options: &str) -> Self {
        Self::new(unit, &[ATTENTION], options)
    }
    /// Products and look-ups with a type of weights, named as in `weights.cl`.
    pub(crate) fn weights(unit: &Unit, name: &str, scaled: bool, cut: Cut) -> Self {
        let options = format!("-DSPLIT={} -DWEIGHT_{name}=1 -DSCALED={}", cut.split, u8::from(scaled));
        let mut kernels = Self::new(unit, &[WEIGHTS, VECTOR, GEMM, EMBED], &options);
        kernels.tiles = vec![1, cut.rows];
        kernels
    }

    fn source(&self) -> String {
        let mut source = COMMON.to_owned();
        for part in self.sources {
            if *part == GEMM {
                for rows in &self.tiles {
                    source.push_str(&format!("#define ROWS {rows}\n{GEMM}\n#undef ROWS\n"));
                }
            } else {
                source.push_str(part);
            }
        }
        #[cfg(test)]
        let source = crate::seeded::spoil(source, &self.options);
        source
    }
}

/// A built program.
pub(crate) struct Program(ClProgram);

// SAFETY: a program object may be used by any thread.
unsafe impl Send for Program {}
// SAFETY: as above.
unsafe impl Sync for Program {}

impl Program {
    /// A kernel object of its own: arguments are part of it.
    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel, Failure> {
        let name = std::ffi::CString::new(name).map_err(|_| Failure::internal("a kernel's name with a zero"))?;
        let kernel = create_kernel(self.0.get(), &name);
        kernel.map(Kernel::new).map_err(|error| reported("clCreateKernel", error).about(name.to_string_lossy()))
    }
}

/// Programs of a device, each built when it is first wanted.
#[derive(Default)]
pub(crate) struct Programs(Mutex<HashMap<Kernels, Result<Arc<Program>, Failure>>>);

impl Programs {
    pub(crate) fn get(&self, unit: &Unit, kernels: &Kernels) -> Result<Arc<Program>, Failure> {
        // Held while building: two threads that want a program want it once.
        let mut built = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(program) = built.get(kernels) {
            return program.clone();
        }
        let program = build(unit, kernels).map(|program| Arc::new(Program(program)));
        built.insert(kernels.clone(), program.clone());
        program
    }
}

fn build(unit: &Unit, kernels: &Kernels) -> Result<ClProgram, Failure> {
    // Tests of the crate leave the user's cache alone.
    let (source, cache) = (kernels.source(), if cfg!(test) { Cache::none() } else { Cache::of_user() });
    let key = Key::of(&[&source, &kernels.options, &unit.facts.fingerprint]);
    if let Some(binary) = cache.load(&key) {
        match ClProgram::create_and_build_from_binary(&unit.context, &[&binary], &kernels.options) {
            Ok(program) => return Ok(program),
            Err(_) => cache.remove(&key),
        }
    }
    let program = ClProgram::create_from_source(&unit.context, &source);
    let mut program = program.map_err(|error| reported("clCreateProgramWithSource", error))?;
    if let Err(error) = program.build(&[unit.device.id()], &kernels.options) {
        let failure = reported("clBuildProgram", error.0);
        if error.0 == CL_BUILD_PROGRAM_FAILURE {
            let log = program.get_build_log(unit.device.id()).unwrap_or_default();
            crate::host::warn(&format!("build with {:?} fails:\n{log}", kernels.options));
        }
        return Err(failure.about(&kernels.options));
    }
    let binaries = get_program_info(program.get(), CL_PROGRAM_BINARIES).map(Vec::<Vec<u8>>::from).unwrap_or_default();
    if let [binary] = &binaries[..] {
        cache.store(&key, binary);
    }
    Ok(program)
}

/// Enqueues a kernel of one work-item whose arguments are buffers.
///
/// # Safety
/// The kernel takes just these, and they are alive until it has run.
pub(crate) unsafe fn launch_single(queue: &CommandQueue, kernel: &Kernel, buffers: &[cl_mem]) -> Result<(), Failure> {
    for (i, buffer) in buffers.iter().enumerate() {
        // SAFETY: by the caller's promise.
        let set =
            unsafe { set_kernel_arg(kernel.get(), i as u32, size_of::<cl_mem>(), std::ptr::from_ref(buffer).cast()) };
        set.map_err(|error| reported("clSetKernelArg", error))?;
    }
    let one = [1_usize; 1];
    // SAFETY: arguments are set; one dimension.
    let event = unsafe {
        let none = std::ptr::null();
        enqueue_nd_range_kernel(queue.get(), kernel.get(), 1, none, one.as_ptr(), one.as_ptr(), 0, std::ptr::null())
    };
    done("clEnqueueNDRangeKernel", event)
}
