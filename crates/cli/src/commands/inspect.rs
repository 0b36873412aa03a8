//! `qwen models inspect`: what is in a model, and how much memory it needs. Only headers are read.

use std::io::Write;

use clap::Args;
use qwen_formats::{Checkpoint, Container, DType};
use qwen_models::family::{FeedForward, ModelConfig, ModelInfo, TensorIndex, build_graph, read_config};
use serde::Serialize;

use crate::console::{NAME, bytes, grouped, print_json, printable, stdout};
use crate::error::CliError;
use crate::model;

const EXAMPLES: &str = "\
Examples:
  qwen models inspect smollm2
  qwen models inspect Qwen2.5-7B-Instruct-Q4_K_M.gguf --context 32768
  qwen models inspect ./DeepSeek-V3 --tensors --json

Memory is that of weights, and of keys and values for one sequence of the context; activations come on top.";

/// Show what is in a model, and the memory that it needs
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Inspect {
    /// A GGUF file, a directory in Hugging Face layout, a hub name, or `smollm2`
    #[arg(value_name = "MODEL", default_value = "smollm2")]
    model: String,
    /// Tokens of context to compute memory for [default: the model's own, at most 4096]
    #[arg(long, value_name = "N")]
    context: Option<u64>,
    /// List the tensors too
    #[arg(long)]
    tensors: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

const DEFAULT_CONTEXT: u64 = 4096;
const CACHE_TYPES: [DType; 2] = [DType::BF16, DType::F32];

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    path: String,
    format: &'static str,
    file_bytes: u64,
    files: usize,
    architecture: &'static str,
    parameters: u64,
    active_parameters: u64,
    weight_bytes: u64,
    bits_per_parameter: f64,
    quantization: Vec<Storage>,
    layers: u32,
    moe_layers: usize,
    hidden_size: u32,
    num_attention_heads: u32,
    num_key_value_heads: u32,
    head_dim: u32,
    vocab_size: u32,
    num_experts: Option<u32>,
    experts_per_token: Option<u32>,
    max_position_embeddings: u64,
    context: u64,
    cache: Vec<Cache>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tensors: Option<Vec<Tensor>>,
}

#[derive(Debug, Serialize)]
struct Storage {
    dtype: String,
    bytes: u64,
}

/// Memory with keys and values stored in a type.
#[derive(Debug, Serialize)]
struct Cache {
    dtype: String,
    bytes_per_token: u64,
    bytes: u64,
    /// Weights and cache.
    total_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
}

impl Inspect {
    /// Runs the command.
    ///
    /// # Errors
    /// If the model can't be read or is not supported.
    pub fn run(self) -> Result<(), CliError> {
        let path = model::resolve(&self.model)?;
        let checkpoint = Checkpoint::open(&path)?;
        let config = read_config(&checkpoint)?;
        let graph = build_graph(&config, &TensorIndex::from(&checkpoint)).map_err(CliError::within(&path))?;
        let info = ModelInfo::new(&config, &graph);
        let report = self.report(&checkpoint, &config, &info);
        if self.json { print_json(&report) } else { print_report(&report, &info) }
    }

    fn report(&self, checkpoint: &Checkpoint, config: &ModelConfig, info: &ModelInfo) -> Report {
        let context = self.context.unwrap_or_else(|| info.max_position_embeddings.min(DEFAULT_CONTEXT));
        let tensor = |tensor: &qwen_formats::TensorInfo| Tensor {
            name: tensor.name.clone(),
            dtype: tensor.dtype.to_string(),
            shape: tensor.shape.clone(),
            bytes: tensor.bytes,
        };
        let cache = |dtype: DType| {
            let bytes_per_token = info.cache_bytes_per_token(dtype)?;
            Some(Cache {
                dtype: dtype.to_string(),
                bytes_per_token,
                bytes: bytes_per_token.checked_mul(context)?,
                total_bytes: info.memory_for_context(context, dtype)?,
            })
        };
        Report {
            path: checkpoint.path().display().to_string(),
            format: match checkpoint.container() {
                Container::Gguf => "gguf",
                Container::Safetensors => "safetensors",
                _ => "unknown",
            },
            file_bytes: checkpoint.file_bytes(),
            files: checkpoint.shard_paths().len(),
            architecture: info.family,
            parameters: info.parameters,
            active_parameters: info.active_parameters,
            weight_bytes: info.weight_bytes,
            bits_per_parameter: info.bits_per_parameter(),
            quantization: info.storage.iter().map(|(d, n)| Storage { dtype: d.to_string(), bytes: *n }).collect(),
            layers: config.num_hidden_layers,
            moe_layers: config.layers.iter().filter(|layer| layer.feed_forward == FeedForward::Moe).count(),
            hidden_size: config.hidden_size,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            vocab_size: config.vocab_size,
            num_experts: config.moe.map(|moe| moe.num_experts),
            experts_per_token: config.moe.map(|moe| moe.top_k),
            max_position_embeddings: info.max_position_embeddings,
            context,
            cache: CACHE_TYPES.into_iter().filter_map(cache).collect(),
            tensors: self.tensors.then(|| checkpoint.tensors().map(tensor).collect()),
        }
    }
}

fn print_report(report: &Report, info: &ModelInfo) -> Result<(), CliError> {
    let mut out = std::io::BufWriter::new(stdout());
    writeln!(out, "{NAME}{}{NAME:#}", printable(&report.path))?;
    let mut line = |name: &str, value: String| writeln!(out, "  {name:<16}{value}");
    line("format", format!("{}, {} in {} file(s)", report.format, bytes(report.file_bytes), report.files))?;
    line("architecture", report.architecture.to_owned())?;
    let active = match report.active_parameters {
        n if n < report.parameters => format!(", {} of them for a token", grouped(n)),
        _ => String::new(),
    };
    line("parameters", format!("{}{active}", grouped(report.parameters)))?;
    line("stored as", format!("{}, {:.2} bits a parameter", info.quantization(), report.bits_per_parameter))?;
    let experts = match (report.num_experts, report.experts_per_token) {
        (Some(n), Some(k)) => format!(", {} of them with {n} experts, {k} for a token", report.moe_layers),
        _ => String::new(),
    };
    line("layers", format!("{}{experts}", report.layers))?;
    let heads =
        format!("{} for queries, {} for keys and values", report.num_attention_heads, report.num_key_value_heads);
    line("heads", format!("{heads}, {} wide", report.head_dim))?;
    line("hidden size", report.hidden_size.to_string())?;
    line("vocabulary", report.vocab_size.to_string())?;
    line("context", format!("at most {} tokens", report.max_position_embeddings))?;
    line("weights", bytes(report.weight_bytes))?;
    for cache in &report.cache {
        let name = format!("cache in {}", cache.dtype);
        let per_token = format!("{} a token", bytes(cache.bytes_per_token));
        let total = format!("{} for {} tokens", bytes(cache.bytes), report.context);
        line(&name, format!("{per_token}, {total}: {} with the weights", bytes(cache.total_bytes)))?;
    }
    for tensor in report.tensors.iter().flatten() {
        writeln!(out, "  {:<48} {:<8} {:?}", printable(&tensor.name), tensor.dtype, tensor.shape)?;
    }
    out.flush()?;
    Ok(())
}
