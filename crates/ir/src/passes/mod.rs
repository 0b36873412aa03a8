//! Passes: graph in, graph and report out, no hidden state. One file each, in the order in which they run.
//!
//! [`compile`] runs them all: it turns the graph of a model into the [`Program`] of one device and one kind of step. After
//! every pass the graph is verified (in debug builds, or if asked), and its text form can be kept.

use std::collections::HashSet;
use std::fmt;

use crate::program::{Instruction, Program, StepResult};
use crate::{BodyId, DType, Graph, IrError, MlaForm, NodeId, Phase, Sums, SymbolBounds};

pub mod canonicalise;
pub mod expand;
pub mod fuse;
pub mod lower;
pub mod plan_memory;
pub mod precision;
pub mod roles;
pub mod shard;
pub mod specialise;
pub mod stability;
pub mod tile;

pub use shard::Shard;

/// What passes ask a device. Instructions in questions have no real places: kinds, attributes, types and shapes count.
pub trait DeviceModel {
    /// Whether the device has a kernel for it.
    fn supports(&self, instruction: &Instruction) -> bool;
    /// Whether another device computes it where this one has no kernel.
    fn delegates(&self, _: &Instruction) -> bool {
        false
    }
    /// Whether output 0 may be written over operand `operand` of [`Instruction::inputs`].
    fn in_place(&self, instruction: &Instruction, operand: usize) -> bool;
    /// Name of the kernel or tile strategy that it will use.
    fn tiling(&self, instruction: &Instruction) -> Option<String>;
    /// Bytes that an operand must begin at a multiple of, a power of two: columns of a value that don't are no operand.
    fn operand_alignment(&self) -> u64 {
        1
    }
    /// How the device sums products by itself, and how many it adds at a time. Where that is not float32, the precision pass asks it for
    /// wider sums if an op's error class needs them.
    fn sums(&self) -> (Sums, u32) {
        (Sums::F32, 1)
    }
    /// Alignment of temporaries in bytes, a power of two.
    fn arena_alignment(&self) -> u64 {
        64
    }
}

/// A device that can do everything that the op vocabulary describes.
#[derive(Debug, Clone, Copy, Default)]
pub struct PermissiveDevice;

impl DeviceModel for PermissiveDevice {
    fn supports(&self, _: &Instruction) -> bool {
        true
    }
    fn in_place(&self, instruction: &Instruction, operand: usize) -> bool {
        plan_memory::vocabulary_in_place(&instruction.op, operand, instruction.inputs.len())
    }
    fn tiling(&self, _: &Instruction) -> Option<String> {
        None
    }
}

/// Names of the passes, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PassName {
    /// Cuts the graph for one device of a group.
    Shard,
    /// Removes what is said twice or not used, joins projections of one input.
    Canonicalise,
    /// Fits the graph to a kind of step.
    Specialise,
    /// Joins nodes that a device does as one.
    Fuse,
    /// Chooses the form of products and the type of caches.
    Precision,
    /// Checks and adds what the chosen precision needs.
    Stability,
    /// Writes out the layers.
    Expand,
    /// Gives temporaries their places.
    PlanMemory,
    /// Records the device's kernels.
    Tile,
    /// Makes the program.
    Lower,
}

impl PassName {
    /// All passes, in order.
    pub const ALL: [Self; 10] = [
        Self::Shard,
        Self::Canonicalise,
        Self::Specialise,
        Self::Fuse,
        Self::Precision,
        Self::Stability,
        Self::Expand,
        Self::PlanMemory,
        Self::Tile,
        Self::Lower,
    ];
    /// Name on command lines and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shard => "shard",
            Self::Canonicalise => "canonicalise",
            Self::Specialise => "specialise",
            Self::Fuse => "fuse",
            Self::Precision => "precision",
            Self::Stability => "stability",
            Self::Expand => "expand",
            Self::PlanMemory => "plan_memory",
            Self::Tile => "tile",
            Self::Lower => "lower",
        }
    }
}

impl fmt::Display for PassName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for PassName {
    type Err = IrError;
    fn from_str(text: &str) -> Result<Self, IrError> {
        Self::ALL.into_iter().find(|pass| pass.name() == text).ok_or_else(|| IrError::Pass {
            pass: "pipeline",
            what: format!("no pass is called {text:?}; the passes are {}", Self::ALL.map(Self::name).join(", ")),
        })
    }
}

/// How exact products have to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// 8-bit activations wherever weights are quantised, half-precision caches.
    Fast,
    /// 8-bit activations within the budget on the logits' divergence, half-precision caches.
    #[default]
    Balanced,
    /// float32 throughout.
    Exact,
}

impl std::str::FromStr for Policy {
    type Err = IrError;
    fn from_str(text: &str) -> Result<Self, IrError> {
        match text {
            "fast" => Ok(Self::Fast),
            "balanced" => Ok(Self::Balanced),
            "exact" => Ok(Self::Exact),
            other => Err(IrError::Pass {
                pass: "precision",
                what: format!("no policy is called {other:?}; there are fast, balanced, exact"),
            }),
        }
    }
}

/// Storage type of caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvDType {
    /// As the policy says.
    #[default]
    Auto,
    /// float32.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

impl KvDType {
    /// The type that caches have.
    #[must_use]
    pub const fn storage(self, policy: Policy) -> DType {
        match (self, policy) {
            (Self::F32, _) | (Self::Auto, Policy::Exact) => DType::F32,
            (Self::F16, _) => DType::F16,
            (Self::Bf16 | Self::Auto, _) => DType::BF16,
        }
    }
}

impl std::str::FromStr for KvDType {
    type Err = IrError;
    fn from_str(text: &str) -> Result<Self, IrError> {
        match text {
            "auto" => Ok(Self::Auto),
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            other => Err(IrError::Pass {
                pass: "precision",
                what: format!("no cache type is called {other:?}; there are auto, f32, f16, bf16"),
            }),
        }
    }
}

/// What to compile for.
#[derive(Debug, Clone, PartialEq)]
pub struct CompileOptions {
    /// Kind of step.
    pub phase: Phase,
    /// Largest sizes; the arena is planned for the maxima.
    pub bounds: SymbolBounds,
    /// Form of latent attention; chosen by phase if none.
    pub mla_form: Option<MlaForm>,
    /// Precision.
    pub policy: Policy,
    /// Caches.
    pub kv_dtype: KvDType,
    /// What the step gives.
    pub result: StepResult,
    /// Which device of a group it is for; none: a device alone.
    pub shard: Option<Shard>,
    /// Whether to fuse.
    pub fuse: bool,
    /// Pass after which to keep the text form.
    pub dump_after: Option<PassName>,
    /// Verify after every pass.
    pub verify: bool,
}

impl CompileOptions {
    /// Defaults for a kind of step and its sizes.
    #[must_use]
    pub const fn new(phase: Phase, bounds: SymbolBounds) -> Self {
        Self {
            phase,
            bounds,
            mla_form: None,
            policy: Policy::Balanced,
            kv_dtype: KvDType::Auto,
            result: StepResult::Logits,
            shard: None,
            fuse: true,
            dump_after: None,
            verify: cfg!(debug_assertions),
        }
    }
}

/// What a pass did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Which pass.
    pub pass: PassName,
    /// Changes to the graph.
    pub changes: usize,
    /// What a reader of a report wants to know, one line each.
    pub notes: Vec<String>,
}

impl Report {
    pub(crate) const fn new(pass: PassName) -> Self {
        Self { pass, changes: 0, notes: Vec::new() }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} changes", self.pass, self.changes)?;
        self.notes.iter().try_for_each(|note| write!(f, "\n  {note}"))
    }
}

/// A model made ready for a device.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// What to execute.
    pub program: Program,
    /// The graph that it was lowered from, layers written out.
    pub graph: Graph,
    /// Places of temporaries.
    pub memory: plan_memory::MemoryPlan,
    /// What each pass did.
    pub reports: Vec<Report>,
    /// Text after the pass asked for.
    pub dump: Option<String>,
}

/// Turns the graph of a model into a program.
///
/// # Errors
/// If a pass can't do its work, or leaves a graph that breaks an invariant.
pub fn compile(graph: &Graph, options: &CompileOptions, device: &dyn DeviceModel) -> Result<Compiled, IrError> {
    let mut run = Run { options, reports: Vec::new(), dump: None };
    let mut graph = graph.clone();
    // Always: the graph may come from a text, and the passes rely on it.
    crate::verify(&graph)?;
    if options.shard.is_some() || options.dump_after == Some(PassName::Shard) {
        run.pass(PassName::Shard, &mut graph, |g| shard::run(g, options.shard))?;
    }
    run.pass(PassName::Canonicalise, &mut graph, |g| canonicalise::run(g, device))?;
    run.pass(PassName::Specialise, &mut graph, |g| specialise::run(g, options))?;
    if options.fuse {
        run.pass(PassName::Fuse, &mut graph, |g| fuse::run(g, device))?;
    }
    run.pass(PassName::Precision, &mut graph, |g| precision::run(g, options, device))?;
    run.pass(PassName::Stability, &mut graph, stability::run)?;
    run.pass(PassName::Expand, &mut graph, |g| {
        let (flat, report) = expand::run(g, options.result)?;
        *g = flat;
        Ok(report)
    })?;
    let mut memory = None;
    run.pass(PassName::PlanMemory, &mut graph, |g| {
        let (plan, report) = plan_memory::run(g, device)?;
        memory = Some(plan);
        Ok(report)
    })?;
    let memory = memory.unwrap_or_default();
    if options.dump_after == Some(PassName::PlanMemory) {
        run.dump = Some(crate::text::print_with_places(&graph, &memory));
    }
    run.pass(PassName::Tile, &mut graph, |g| tile::run(g, device))?;
    let mut program = None;
    run.pass(PassName::Lower, &mut graph, |g| {
        let (lowered, report) = lower::run(g, &memory, options.result)?;
        program = Some(lowered);
        Ok(report)
    })?;
    let program = program.ok_or_else(|| IrError::Pass { pass: "lower", what: "no program was made".to_owned() })?;
    if options.dump_after == Some(PassName::Lower) {
        run.dump = Some(program.to_string());
    }
    if options.verify {
        crate::check::check(&graph, &program, device, &graph.bounds)?;
    }
    Ok(Compiled { program, graph, memory, reports: run.reports, dump: run.dump })
}

struct Run<'a> {
    options: &'a CompileOptions,
    reports: Vec<Report>,
    dump: Option<String>,
}

impl Run<'_> {
    fn pass(
        &mut self,
        name: PassName,
        graph: &mut Graph,
        pass: impl FnOnce(&mut Graph) -> Result<Report, IrError>,
    ) -> Result<(), IrError> {
        let _span = tracing::debug_span!("pass", name = name.name(), graph = graph.name).entered();
        let report = pass(graph)?;
        for note in &report.notes {
            tracing::debug!(changes = report.changes, "{note}");
        }
        self.reports.push(report);
        if self.options.verify {
            crate::verify(graph)?;
        }
        if self.options.dump_after == Some(name) {
            self.dump = Some(crate::text::print(graph));
        }
        Ok(())
    }
}

/// Whether a device supports a node for every layer that runs it.
pub(crate) fn supported(graph: &Graph, body: BodyId, node: NodeId, device: &dyn DeviceModel) -> Result<bool, IrError> {
    of_every_layer(graph, body, node, |instruction| device.supports(instruction))
}

/// Whether for every layer that runs a node the device supports it, or has it computed elsewhere.
pub(crate) fn computed(graph: &Graph, body: BodyId, node: NodeId, device: &dyn DeviceModel) -> Result<bool, IrError> {
    of_every_layer(graph, body, node, |instruction| device.supports(instruction) || device.delegates(instruction))
}

fn of_every_layer(
    graph: &Graph,
    body: BodyId,
    node: NodeId,
    holds: impl Fn(&Instruction) -> bool,
) -> Result<bool, IrError> {
    let layers = match body {
        BodyId::Main => vec![graph.node(node).attributes.layer],
        BodyId::Template(template) => graph.layers_of(template).into_iter().map(Some).collect(),
    };
    let mut asked = HashSet::new();
    for layer in layers {
        let instruction = lower::describe(graph, node, layer)?;
        let dtypes: Vec<DType> = instruction.inputs.iter().map(|operand| operand.dtype).collect();
        if asked.insert(dtypes) && !holds(&instruction) {
            return Ok(false);
        }
    }
    Ok(true)
}
