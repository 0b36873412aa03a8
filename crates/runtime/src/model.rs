//! A model on a device: weights, cache, arenas, and one executor per bucket of step sizes.

use std::sync::Arc;

use qwen_formats::Checkpoint;
use qwen_hal::Device;
use qwen_ir::passes::{self, CompileOptions, KvDType, PassName, Policy, Report};
use qwen_ir::program::StepResult;
use qwen_ir::{Graph, GrowthPattern, MlaForm, Op, Phase, Symbol, SymbolBounds};

use crate::batch::{Batch, SequenceKv};
use crate::cost::{Cost, StepObserver};
use crate::device_model::HalDeviceModel;
use crate::executor::{DeviceSide, Executor, Failed};
use crate::kv_memory::{self, KvMemory};
use crate::kv_pool::{KvPool, KvPoolStats};
use crate::placement::{Decided, Fallback, MAIN, Placement, Step};
use crate::stages::{self, Stage, Stages};
use crate::{RuntimeError, group};

mod compile;
mod differences;
mod memory;
mod planned;
mod rank;
mod walk;

pub use compile::Compiled;
pub use differences::OpDifference;
pub use planned::{Explained, PlannedOp, PlannedStep};

use rank::Rank;

/// Limits and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelOptions {
    /// Precision.
    pub policy: Policy,
    /// Storage type of the cache.
    pub kv_dtype: KvDType,
    /// Most tokens of a sequence.
    pub max_seq_len: u32,
    /// Most sequences of a step.
    pub max_sequences: u32,
    /// Most tokens of a step.
    pub max_step_tokens: u32,
    /// Most tokens over all sequences that the cache holds.
    pub max_cached_tokens: u64,
    /// Form of latent attention, whatever the phase.
    pub mla_form: Option<MlaForm>,
    /// Plan steps that give hidden states too ([`StepResult::Hidden`]).
    pub hidden: bool,
    /// Keep the text form of the graph after this pass.
    pub dump_after: Option<PassName>,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            policy: Policy::Balanced,
            kv_dtype: KvDType::Auto,
            max_seq_len: 4096,
            max_sequences: 16,
            max_step_tokens: 512,
            max_cached_tokens: 4096,
            mla_form: None,
            hidden: false,
            dump_after: None,
        }
    }
}

/// Bytes by pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryReport {
    /// Weights in packed form.
    pub weights_packed: u64,
    /// Weights that were copied or converted.
    pub weights_owned: u64,
    /// Cache that is backed.
    pub kv_committed: u64,
    /// Temporaries, router pool, expert pool, workspace.
    pub arenas: [u64; 4],
    /// Inputs and results.
    pub step_buffers: u64,
    /// Blocks of the cache.
    pub kv: KvPoolStats,
}

/// A model on a device, or on several that compute it together.
pub struct Model {
    /// A part of every layer each; one alone has the whole.
    ranks: Vec<Rank>,
    /// Which layers are on which devices.
    stages: Stages,
    placement: Placement,
    graph: Graph,
    options: ModelOptions,
    block_size: u32,
    kv_pool: KvPool,
    phase_matters: bool,
    fallbacks: Vec<Fallback>,
    reports: Vec<Report>,
    dump: Option<String>,
}

impl std::fmt::Debug for Model {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Model").field("name", &self.graph.name).field("device", self.device()).finish_non_exhaustive()
    }
}

/// Result, phase and most tokens of a program.
type ProgramKey = (StepResult, Phase, u32);

fn has_latent_attention(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| matches!(node.op, Op::MlaAttention { .. }))
}

/// Divides a model's layers among the stages of a group.
fn stages_of(
    graph: &Graph,
    placement: &Placement,
    options: &ModelOptions,
    block_size: u32,
    limit: u32,
) -> Result<Stages, RuntimeError> {
    let devices: Vec<Device> = placement.members().cloned().collect();
    let count = placement.stages;
    if count == 0 || !devices.len().is_multiple_of(count) {
        let reason = format!("{} devices are not {count} stages of as many each", devices.len());
        return Err(group::refusal(&devices, reason, "name a multiple of --pipeline-parallel-size"));
    }
    let cached = options.kv_dtype.storage(options.policy);
    let cache = |layer: u32| {
        let held = |_, of: u32| of == layer;
        kv_memory::bytes_per_block(graph, cached, block_size, &held).saturating_mul(u64::from(limit))
    };
    let of_stage = |devices: &[Device]| devices.iter().map(|device| device.caps().memory_total).min().flatten();
    let memory: Vec<Option<u64>> = devices.chunks(devices.len() / count).map(of_stage).collect();
    Stages::new(graph, &cache, &memory).ok_or_else(|| {
        let layers = stages::layers(graph);
        let reason = format!("{layers} layers can't be divided into {count} stages, each of which has one at least");
        group::refusal(&devices, reason, "take a smaller --pipeline-parallel-size")
    })
}

/// Step sizes that have a program of their own: small ones keep their temporaries in the cache.
const BUCKETS: [u32; 3] = [16, 128, 512];

impl Model {
    /// Loads a model: compiles the graph for its largest and its smallest steps and packs the weights.
    ///
    /// # Errors
    /// If a pass, an op or a weight does not fit, memory is short, or more values would cross between devices than allowed.
    pub fn load(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        placement: impl Into<Placement>,
        options: ModelOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, RuntimeError> {
        let mut model = Self::unprepared(graph, checkpoint, &placement.into(), options)?;
        model.prepare(progress)?;
        Ok(model)
    }

    /// A model that has compiled and loaded nothing yet.
    fn unprepared(
        graph: Graph,
        checkpoint: &Arc<Checkpoint>,
        placement: &Placement,
        options: ModelOptions,
    ) -> Result<Self, RuntimeError> {
        let block_size = graph
            .states
            .iter()
            .find_map(|state| match state.growth {
                GrowthPattern::PerBlock { tokens } => Some(tokens),
                GrowthPattern::Fixed => None,
            })
            .unwrap_or(1)
            .max(1);
        let blocks = options.max_cached_tokens.div_ceil(u64::from(block_size));
        // Each sequence may leave its last block partly empty.
        let blocks = blocks.saturating_add(u64::from(options.max_sequences));
        let limit = u32::try_from(blocks).ok().filter(|n| u64::from(*n) * u64::from(block_size) <= i32::MAX as u64);
        let limit = limit.ok_or_else(|| RuntimeError::Step {
            what: "max_cached_tokens",
            expected: format!("at most {}", i32::MAX),
            found: options.max_cached_tokens.to_string(),
        })?;
        let phase_matters = options.mla_form.is_none() && has_latent_attention(&graph);
        let stages = stages_of(&graph, placement, &options, block_size, limit)?;
        Ok(Self {
            ranks: Rank::all(&graph, checkpoint, placement, &stages, block_size)?,
            stages,
            placement: placement.clone(),
            kv_pool: KvPool::new(limit, 8),
            graph,
            options,
            block_size,
            phase_matters,
            fallbacks: Vec::new(),
            reports: Vec::new(),
            dump: None,
        })
    }

    /// A program of the first rank for each phase and size of step that gives logits.
    fn programs(&self) -> Result<Vec<Step>, RuntimeError> {
        self.programs_for(0, StepResult::Logits)
    }

    fn programs_for(&self, rank: usize, result: StepResult) -> Result<Vec<Step>, RuntimeError> {
        let phases: &[Phase] = if self.phase_matters { &[Phase::Prefill, Phase::Decode] } else { &[Phase::Mixed] };
        let mut programs = Vec::new();
        // Hidden states are asked for of prompts alone.
        for phase in phases.iter().filter(|phase| result == StepResult::Logits || **phase != Phase::Decode) {
            for tokens in self.buckets(*phase) {
                programs.push((*phase, tokens, self.compile(rank, result, *phase, tokens)?));
            }
        }
        Ok(programs)
    }

    fn prepare(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<(), RuntimeError> {
        let ranks = self.ranks.len();
        let decided = (0..ranks).map(|rank| self.decide(rank)).collect::<Result<Vec<_>, RuntimeError>>()?;
        // Of all devices, before anything is taken on the first.
        for (rank, (programs, decided)) in decided.iter().enumerate() {
            self.check_memory(rank, programs, decided).map_err(|failed| self.blame(rank, failed))?;
        }
        for (rank, (programs, decided)) in decided.into_iter().enumerate() {
            let progress = &mut |done, total| progress(rank * total + done, ranks * total);
            self.prepare_rank(rank, programs, decided, progress).map_err(|failed| self.blame(rank, failed))?;
        }
        Ok(())
    }

    /// The programs of a rank, and where each instruction and cache is.
    fn decide(&mut self, rank: usize) -> Result<(Vec<Step>, Decided), RuntimeError> {
        let mut programs = self.programs_for(rank, StepResult::Logits)?;
        if self.options.hidden {
            programs.extend(self.programs_for(rank, StepResult::Hidden)?);
        }
        if let (0, Some((_, _, compiled))) = (rank, programs.first()) {
            self.reports.clone_from(&compiled.reports);
            self.dump.clone_from(&compiled.dump);
        }
        let decided = self.assign(rank, &programs)?;
        Ok((programs, decided))
    }

    /// Takes the memory of a rank's devices and loads its weights.
    fn prepare_rank(
        &mut self,
        rank: usize,
        programs: Vec<Step>,
        decided: Decided,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(), Failed> {
        let (kv_dtype, limit) = (memory::kv_dtype(&programs), self.kv_pool.limit());
        let Rank { sides, graph, .. } = &mut self.ranks[rank];
        for (side, on) in sides.iter_mut().enumerate() {
            let held = |state, layer| decided.holder(&self.stages, state, layer) == side;
            let kv = KvMemory::reserve(&on.device, graph, kv_dtype, self.block_size, limit, &held);
            on.kv = kv.map_err(|error| (side, error))?;
        }
        self.ranks[rank].plan(programs.into_iter().zip(decided.assignments).collect(), progress)
    }

    /// Says which device of a group failed.
    fn blame(&self, rank: usize, (side, error): Failed) -> RuntimeError {
        if !self.is_group() {
            return error;
        }
        self.ranks[rank].blame(side, self.ranks.len(), self.stages.count(), error)
    }

    /// Side of every instruction of the programs and of every state. A device that helps out and has nothing to do is let go.
    fn assign(&mut self, rank: usize, programs: &[Step]) -> Result<Decided, RuntimeError> {
        let decided = Decided::new(&self.placement, &self.ranks[rank].sides[MAIN].device, &self.stages, programs)?;
        decided.check(&self.placement, &self.stages, programs)?;
        if decided.fallbacks.is_empty() {
            self.ranks[rank].sides.truncate(self.stages.count());
            return Ok(decided);
        }
        let Some(fallback) = &self.placement.fallback else { return Ok(decided) };
        if rank > 0 {
            // All devices are of one type: what is told of the first holds for each.
            return Ok(decided);
        }
        for refused in &decided.fallbacks {
            tracing::warn!(
                "computed on {} instead of {}: {refused}",
                fallback.plugin().name(),
                self.device().plugin().name()
            );
        }
        tracing::warn!(
            "each step copies {} values between devices, at most {} are allowed",
            decided.crossings(),
            self.placement.max_crossings
        );
        self.fallbacks.clone_from(&decided.fallbacks);
        Ok(decided)
    }

    fn buckets(&self, phase: Phase) -> Vec<u32> {
        let most = match phase {
            Phase::Decode => self.options.max_sequences,
            Phase::Prefill | Phase::Mixed => self.options.max_step_tokens,
        };
        let mut buckets: Vec<u32> = BUCKETS.into_iter().filter(|n| *n < most).collect();
        buckets.push(most.max(1));
        buckets
    }

    fn compile(
        &self,
        rank: usize,
        result: StepResult,
        phase: Phase,
        tokens: u32,
    ) -> Result<passes::Compiled, RuntimeError> {
        self.compile_beside(rank, result, phase, tokens, None)
    }

    /// The same where `twin` is to run the program too.
    fn compile_beside(
        &self,
        rank: usize,
        result: StepResult,
        phase: Phase,
        tokens: u32,
        twin: Option<&Device>,
    ) -> Result<passes::Compiled, RuntimeError> {
        let tokens = u64::from(tokens);
        let limit = u64::from(self.kv_pool.limit());
        let bounds = SymbolBounds::default()
            .with(Symbol::Tokens, 1, tokens)
            .with(Symbol::Sequences, 1, tokens.min(u64::from(self.options.max_sequences)))
            .with(Symbol::Rows, 1, tokens)
            .with(Symbol::Blocks, 1, u64::from(self.options.max_seq_len).div_ceil(u64::from(self.block_size)).max(1))
            .with(Symbol::CacheBlocks, 1, limit.max(1));
        let mut options = CompileOptions::new(phase, bounds);
        options.policy = self.options.policy;
        options.kv_dtype = self.options.kv_dtype;
        options.mla_form = self.options.mla_form;
        options.result = result;
        options.dump_after = self.options.dump_after;
        let of_rank = &self.ranks[rank];
        let Rank { sides, graph, shard, .. } = of_rank;
        options.shard = *shard;
        let fallback = of_rank.fallback(&self.stages).map(|side| &side.device);
        let device = HalDeviceModel::new(&sides[MAIN].device, bounds, phase, &graph.states).with_fallback(fallback);
        let device = device.with_twin(twin);
        let _span = tracing::info_span!("compile", ?phase, tokens).entered();
        Ok(passes::compile(&self.graph, &options, &device)?)
    }

    /// Blocks for `tokens` more tokens of a sequence; all of them or none.
    ///
    /// # Errors
    /// [`RuntimeError::KvExhausted`] if the cache is full.
    pub fn reserve(&mut self, sequence: &mut SequenceKv, tokens: u32) -> Result<(), RuntimeError> {
        let end = u64::from(sequence.len) + u64::from(tokens);
        let needed = end.div_ceil(u64::from(self.block_size));
        let wanted = needed.saturating_sub(sequence.blocks.len() as u64);
        let available = self.kv_pool.available();
        let limit = self.kv_pool.limit();
        let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
        if wanted > available {
            return Err(RuntimeError::KvExhausted { wanted, free: available, limit });
        }
        if let Some(total) = self.kv_pool.growth_for(wanted) {
            for side in self.ranks.iter_mut().flat_map(|rank| &mut rank.sides) {
                side.kv.commit(total)?;
            }
            self.kv_pool.committed(total);
        }
        for _ in 0..wanted {
            sequence.blocks.push(self.kv_pool.allocate()?);
        }
        Ok(())
    }

    /// Gives the blocks of a sequence back.
    ///
    /// # Errors
    /// [`RuntimeError::StaleBlock`] if one was given back before; the others are given back nevertheless.
    pub fn release(&mut self, sequence: &mut SequenceKv) -> Result<(), RuntimeError> {
        sequence.len = 0;
        let mut result = Ok(());
        for block in sequence.blocks.drain(..) {
            // A stale block must not keep the others.
            result = result.and(self.kv_pool.release(block).map(|_| ()));
        }
        result
    }

    /// Computes a step; `logits` holds the wanted ones afterwards, [rows, vocab]. Sequences are not advanced: that is the
    /// caller's, once the step succeeded. For models whose form depends on the phase, a step holds tokens of one phase only.
    ///
    /// # Errors
    /// If the step is larger than the limits, or an op fails.
    pub fn forward(&mut self, phase: Phase, batch: &Batch, logits: &mut Vec<f32>) -> Result<(), RuntimeError> {
        self.compute(StepResult::Logits, phase, batch, logits)
    }

    /// As [`Model::forward`], for any result: `out` is [rows, [`Model::width`]] afterwards.
    ///
    /// # Errors
    /// As [`Model::forward`], and if the model was loaded without that result.
    pub fn compute(
        &mut self,
        result: StepResult,
        phase: Phase,
        batch: &Batch,
        out: &mut Vec<f32>,
    ) -> Result<(), RuntimeError> {
        self.run(result, phase, batch, out, None)
    }

    /// As [`Model::forward`], waiting for each instruction and telling of it: slower, with the same results.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn forward_observed(
        &mut self,
        phase: Phase,
        batch: &Batch,
        logits: &mut Vec<f32>,
        observer: &mut dyn StepObserver,
    ) -> Result<(), RuntimeError> {
        self.run(StepResult::Logits, phase, batch, logits, Some(observer))
    }

    /// What a step asks of a machine, an entry for each instruction; nothing is computed. Of a group: of each of its devices.
    ///
    /// # Errors
    /// If the step is larger than the limits.
    pub fn step_cost(&self, result: StepResult, phase: Phase, batch: &Batch) -> Result<Vec<Cost>, RuntimeError> {
        let key = self.executor_for(result, phase, batch)?;
        let rank = &self.ranks[0];
        rank.executors.get(&key).map_or_else(|| Ok(Vec::new()), |executor| executor.cost(batch, &rank.sides))
    }

    fn run(
        &mut self,
        result: StepResult,
        phase: Phase,
        batch: &Batch,
        out: &mut Vec<f32>,
        observer: Option<&mut dyn StepObserver>,
    ) -> Result<(), RuntimeError> {
        let key = self.executor_for(result, phase, batch)?;
        if self.is_group() {
            let (width, micro_batch_tokens) = (self.width(result), self.placement.micro_batch_tokens);
            return walk::run(&mut self.ranks, key, batch, micro_batch_tokens, width, out, observer);
        }
        let Rank { sides, executors, .. } = &mut self.ranks[0];
        let Some(executor) = executors.get_mut(&key) else { return Err(self.too_large(phase, batch)) };
        executor.run(batch, sides, out, observer)
    }

    /// The smallest executor that holds a step.
    fn executor_for(&self, result: StepResult, phase: Phase, batch: &Batch) -> Result<ProgramKey, RuntimeError> {
        if result == StepResult::Hidden && !self.options.hidden {
            return Err(RuntimeError::Step {
                what: "result",
                expected: "logits: the model was loaded without hidden states".into(),
                found: "hidden states".into(),
            });
        }
        let phase = if self.phase_matters { phase } else { Phase::Mixed };
        let bucket = self.buckets(phase).into_iter().find(|n| *n as usize >= batch.tokens());
        let key = bucket.map(|bucket| (result, phase, bucket)).filter(|key| self.ranks[0].executors.contains_key(key));
        key.ok_or_else(|| self.too_large(phase, batch))
    }

    fn too_large(&self, phase: Phase, batch: &Batch) -> RuntimeError {
        RuntimeError::Step {
            what: "tokens",
            expected: format!("at most {} of phase {phase:?}", self.options.max_step_tokens),
            found: batch.tokens().to_string(),
        }
    }

    /// Whether prompts and generated tokens are computed by different forms, and so in different steps.
    #[must_use]
    pub const fn phase_matters(&self) -> bool {
        self.phase_matters
    }
    /// Brings to memory what steps read from files: rows of embeddings come from there as tokens ask for them.
    pub fn populate(&self) {
        self.sides().for_each(|side| side.weights.populate());
    }
    /// Most blocks of the cache, over all sequences.
    #[must_use]
    pub const fn cache_blocks(&self) -> u32 {
        self.kv_pool.limit()
    }
    /// Blocks of the cache that nobody has.
    #[must_use]
    pub const fn free_blocks(&self) -> u32 {
        self.kv_pool.available()
    }
    /// All of them.
    #[must_use]
    pub const fn kv_pool(&self) -> &KvPool {
        &self.kv_pool
    }
    /// Tokens of a cache block.
    #[must_use]
    pub const fn block_size(&self) -> u32 {
        self.block_size
    }
    /// Bytes of a cache block over all layers.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.sides().map(|side| side.kv.block_bytes()).sum()
    }
    /// Limits and choices.
    #[must_use]
    pub const fn options(&self) -> &ModelOptions {
        &self.options
    }
    /// Values of a row of logits.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.width(StepResult::Logits)
    }
    /// Values of a row of a result; 0 if the model was loaded without it.
    #[must_use]
    pub fn width(&self, result: StepResult) -> usize {
        let of = |executor: &&Executor| executor.program().result == result;
        let own =
            self.ranks[0].executors.values().find(of).map_or(0, |executor| executor.program().result_width as usize);
        // Of logits, ranks have their columns.
        let whole = || self.graph.body.results.first().and_then(|logits| self.graph.value(*logits).ty.columns());
        match (result, self.ranks.len()) {
            (StepResult::Logits, 2..) => whole().map_or(own, |columns| columns as usize),
            _ => own,
        }
    }
    fn is_group(&self) -> bool {
        self.ranks.len() > 1 || self.stages.count() > 1
    }
    /// Everything that it has on devices.
    fn sides(&self) -> impl Iterator<Item = &DeviceSide> {
        self.ranks.iter().flat_map(|rank| &rank.sides)
    }
    /// What the passes did, for the largest bucket.
    #[must_use]
    pub fn reports(&self) -> &[Report] {
        &self.reports
    }
    /// Text form after the pass asked for.
    #[must_use]
    pub fn dump(&self) -> Option<&str> {
        self.dump.as_deref()
    }
    /// The device; of a group, the first.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.ranks[0].sides[MAIN].device
    }
    /// The devices that compute it together: those of the first stage in order of rank, then those of the next; one alone is the only one.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.placement.members()
    }
    /// Devices that have parts of the same layers. Results depend on their number alone, not on that of stages.
    #[must_use]
    pub const fn ranks(&self) -> usize {
        self.ranks.len()
    }
    /// The layers of each stage.
    #[must_use]
    pub fn stages(&self) -> &[Stage] {
        self.stages.all()
    }
    /// Where it computes.
    #[must_use]
    pub const fn placement(&self) -> &Placement {
        &self.placement
    }
    /// What another device computes, because the model's own refuses it.
    #[must_use]
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }
    /// Most values that a step copies between devices.
    #[must_use]
    pub fn crossings(&self) -> usize {
        self.ranks[0].executors.values().map(Executor::crossings).max().unwrap_or(0)
    }
    /// Bytes by pool, over all devices.
    #[must_use]
    pub fn memory(&self) -> MemoryReport {
        let sum = |of: &dyn Fn(&DeviceSide) -> u64| self.sides().map(of).sum();
        MemoryReport {
            weights_packed: sum(&|side| side.weights.packed_bytes()),
            weights_owned: sum(&|side| side.weights.owned_bytes()),
            kv_committed: sum(&|side| side.kv.committed_bytes()),
            arenas: [0, 1, 2, 3].map(|pool| sum(&|side| side.arenas.bytes()[pool])),
            step_buffers: sum(&|side| side.buffers.bytes()),
            kv: self.kv_pool.stats(),
        }
    }
}
