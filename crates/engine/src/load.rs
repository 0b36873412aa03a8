//! From a path to a model that is ready to compute.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use qwen_formats::Checkpoint;
use qwen_hal::Device;
use qwen_ir::{Graph, MlaForm};
use qwen_models::chat_template::ChatTemplate;
use qwen_models::family::{ModelConfig, ModelInfo, TensorIndex, build_graph, read_config};
use qwen_models::tokenizer::Tokenizer;
use qwen_runtime::{
    Compiled, Explained, KvDType, Model, ModelOptions, OpDifference, PassName, Placement, Policy, RuntimeError,
};

use crate::EngineError;

/// Limits and choices.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadOptions {
    /// Precision.
    pub policy: Policy,
    /// Storage type of the cache.
    pub kv_dtype: KvDType,
    /// Most tokens of a sequence, prompt and answer; by default what the model was made for, at most 4096.
    pub max_seq_len: Option<u32>,
    /// Most sequences of a step.
    pub max_sequences: u32,
    /// Most prompt tokens of a step.
    pub prefill_chunk_size: u32,
    /// Tokens that the cache holds over all sequences; by default one sequence of the full length.
    pub max_cached_tokens: Option<u64>,
    /// Form of latent attention, whatever the phase.
    pub mla_form: Option<MlaForm>,
    /// Give vectors of texts too ([`Request::embed`](crate::Request::embed)).
    pub embeddings: bool,
    /// Keep the text form of the graph after this pass.
    pub dump_after: Option<PassName>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            policy: Policy::Balanced,
            kv_dtype: KvDType::Auto,
            max_seq_len: None,
            max_sequences: 16,
            prefill_chunk_size: 512,
            max_cached_tokens: None,
            mla_form: None,
            embeddings: false,
            dump_after: None,
        }
    }
}

/// Context length if neither the user nor the model asks for less.
pub const DEFAULT_SEQ_LEN: u32 = 4096;

/// Where loading is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadStage {
    /// Headers, config, tokenizer.
    Opening,
    /// So many of so many ops planned and their weights packed.
    Weights {
        /// Done.
        done: usize,
        /// In all.
        total: usize,
    },
}

/// Files of a model, read and checked.
#[derive(Debug)]
pub struct LoadedModel {
    /// Neutral config.
    pub config: ModelConfig,
    /// Sizes for people.
    pub info: ModelInfo,
    /// Text to ids and back; absent for a checkpoint that has none, which still computes logits.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// How messages become a prompt.
    pub chat_template: Option<ChatTemplate>,
    /// Compiled and packed.
    pub model: Model,
}

impl LoadedModel {
    /// Loads a GGUF file or a checkpoint directory onto a device.
    ///
    /// # Errors
    /// If a file is damaged, the model is not supported, or memory is short.
    pub fn load(
        path: &Path,
        placement: impl Into<Placement>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(LoadStage),
    ) -> Result<Self, EngineError> {
        let placement = placement.into();
        progress(LoadStage::Opening);
        let (checkpoint, config, graph) = open(path)?;
        let info = ModelInfo::new(&config, &graph);
        // The tokenizer takes about as long as packing the weights of a small model, so both run side by side.
        let (texts, model) = std::thread::scope(|scope| {
            let texts = scope.spawn(|| load_texts(path, &checkpoint));
            let model = load_model(&config, graph, &checkpoint, placement, options, progress);
            (texts.join(), model)
        });
        let (tokenizer, chat_template) = match texts {
            Ok(texts) => texts?,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let model = model?;
        Ok(Self { config, info, tokenizer: tokenizer.map(Arc::new), chat_template, model })
    }
}

fn load_model(
    config: &ModelConfig,
    graph: Graph,
    checkpoint: &Arc<Checkpoint>,
    placement: Placement,
    options: &LoadOptions,
    progress: &mut dyn FnMut(LoadStage),
) -> Result<Model, EngineError> {
    let options = model_options(config, options)?;
    let mut part = |done, total| progress(LoadStage::Weights { done, total });
    Ok(Model::load(graph, checkpoint, placement, options, &mut part)?)
}

fn model_options(config: &ModelConfig, options: &LoadOptions) -> Result<ModelOptions, EngineError> {
    let limit = config.max_position_embeddings.max(1);
    let max_seq_len = options.max_seq_len.unwrap_or_else(|| limit.min(DEFAULT_SEQ_LEN));
    if max_seq_len == 0 || max_seq_len > limit {
        return Err(EngineError::Parameter {
            name: "max-seq-len",
            expected: format!("1 to {limit}, what the model was made for"),
            found: max_seq_len.to_string(),
        });
    }
    let chunk = options.prefill_chunk_size.clamp(1, 1 << 16);
    let max_sequences = options.max_sequences.clamp(1, 1 << 12);
    Ok(ModelOptions {
        policy: options.policy,
        kv_dtype: options.kv_dtype,
        max_seq_len,
        max_sequences,
        // A longer chunk than a sequence can be serves nobody; decoding sequences must all fit in one step.
        max_step_tokens: chunk.min(max_seq_len).max(max_sequences),
        max_cached_tokens: options.max_cached_tokens.unwrap_or(u64::from(max_seq_len)).max(u64::from(max_seq_len)),
        mla_form: options.mla_form,
        hidden: options.embeddings,
        dump_after: options.dump_after,
    })
}

/// Writes a model with its weights in the forms that a device wants; `progress` is told of bytes written and in all.
///
/// # Errors
/// If a file is damaged, the model is not supported or no GGUF file, or the output can't be written.
pub fn compile(
    path: &Path,
    device: Device,
    out: &mut dyn Write,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Compiled, EngineError> {
    let (checkpoint, config, graph) = open(path)?;
    // A file whose texts can't be read is of no use compiled either.
    load_texts(path, &checkpoint)?;
    let options = model_options(&config, &LoadOptions::default())?;
    Model::write_compiled(graph, &checkpoint, device, options, out, progress).map_err(|error| match error {
        RuntimeError::Output(error) => EngineError::Output(error),
        other => other.into(),
    })
}

/// What would be planned for a model: nothing is loaded or computed.
///
/// # Errors
/// If a file is damaged, the model is not supported, or a plan fails.
pub fn explain(path: &Path, placement: impl Into<Placement>, options: &LoadOptions) -> Result<Explained, EngineError> {
    let (checkpoint, config, graph) = open(path)?;
    let options = model_options(&config, options)?;
    Ok(Model::explain(graph, &checkpoint, placement, options)?)
}

/// Computes tokens as one prompt on two devices, instruction by instruction with the same inputs.
///
/// # Errors
/// If a file is damaged, the model is not supported, memory is short, or the tokens do not fit.
pub fn op_differences(
    path: &Path,
    reference: Device,
    judged: Device,
    options: &LoadOptions,
    tokens: &[u32],
) -> Result<Vec<OpDifference>, EngineError> {
    let (checkpoint, config, graph) = open(path)?;
    let mut options = model_options(&config, options)?;
    options.max_step_tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX).max(1);
    let vocab_size = config.vocab_size;
    if let Some(id) = tokens.iter().find(|id| **id >= vocab_size) {
        return Err(EngineError::TokenRange { id: *id, vocab_size });
    }
    Ok(Model::op_differences(graph, &checkpoint, reference, judged, options, tokens)?)
}

fn open(path: &Path) -> Result<(Arc<Checkpoint>, ModelConfig, Graph), EngineError> {
    let model_error = |source| EngineError::Model { path: path.to_owned(), source: Box::new(source) };
    let checkpoint = Arc::new(Checkpoint::open(path)?);
    let config = read_config(&checkpoint).map_err(model_error)?;
    let graph = build_graph(&config, &TensorIndex::from(&*checkpoint)).map_err(model_error)?;
    Ok((checkpoint, config, graph))
}

type Texts = (Option<Tokenizer>, Option<ChatTemplate>);

fn load_texts(path: &Path, checkpoint: &Checkpoint) -> Result<Texts, EngineError> {
    let tokenizer_error = |source| EngineError::Tokenizer { path: path.to_owned(), source: Box::new(source) };
    let template_error = |source| EngineError::Template { path: path.to_owned(), source: Box::new(source) };
    if let Some(metadata) = checkpoint.metadata() {
        let tokenizer = match metadata.contains("tokenizer.ggml.model") {
            true => Some(Tokenizer::from_gguf(metadata).map_err(tokenizer_error)?),
            false => None,
        };
        let template = match &tokenizer {
            Some(_) => ChatTemplate::from_gguf(metadata).map_err(template_error)?,
            None => None,
        };
        return Ok((tokenizer, template));
    }
    let dir = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
    if !dir.join("tokenizer.json").exists() {
        return Ok((None, None));
    }
    let tokenizer = Tokenizer::from_checkpoint_dir(dir).map_err(tokenizer_error)?;
    let template = ChatTemplate::from_checkpoint_dir(dir).map_err(template_error)?;
    Ok((Some(tokenizer), template))
}
