//! Reads the text form of [`text`](crate::text). In: any text, hostile ones included. Out: a graph whose types were inferred
//! and found equal to the written ones, or an error with line and column. Memory stays within a small multiple of the text;
//! nothing recurses.

use std::collections::HashMap;
use std::str::FromStr;

use crate::lexer::{Lexer, Mark, Setting, Settings};
use crate::{
    Activation, Attention, BinaryFunction, Body, Compute, DType, Dim, Epilogue, GemmType, Graph, GroupScore,
    GrowthPattern, IrError, MemoryScope, MlaAttention, MlaForm, NodeId, Op, Phase, Rope, RopeStyle, Route, RouterScore,
    Sensitivity, StateDecl, StateId, StateLayout, Symbol, Template, TemplateId, TensorType, Tolerance, Transform,
    ValueId, WeightDecl, WeightId, WeightSlice, WeightSource, inputs,
};

/// Most dimensions of a type.
const MAX_RANK: usize = 8;

/// Reads a graph.
///
/// # Errors
/// If the text is not that of a graph, with line and column; or if operands of a node do not fit.
pub fn parse(text: &str) -> Result<Graph, IrError> {
    let mut parser = Parser { lexer: Lexer::new(text), graph: Graph::new(""), values: HashMap::new() };
    parser.graph()?;
    Ok(parser.graph)
}

struct Parser<'t> {
    lexer: Lexer<'t>,
    graph: Graph,
    values: HashMap<u32, ValueId>,
}

/// Parses a name that one of the enums spells.
fn spelled<T>(lexer: &Lexer<'_>, mark: Mark, word: &str, what: &str, value: Option<T>) -> Result<T, IrError> {
    value.ok_or_else(|| lexer.fault_at(mark, what, word))
}

impl Parser<'_> {
    fn graph(&mut self) -> Result<(), IrError> {
        self.lexer.word("graph")?;
        self.graph.name = self.lexer.string()?;
        self.lexer.expect("{")?;
        self.lexer.word("bounds")?;
        for symbol in Symbol::ALL {
            self.lexer.word(symbol.name())?;
            self.lexer.expect("=")?;
            let min = self.lexer.integer()?;
            self.lexer.expect("..")?;
            let max = self.lexer.integer()?;
            self.graph.bounds = self.graph.bounds.with(symbol, min, max);
        }
        while self.lexer.eat_word("weight") {
            self.weight()?;
        }
        while self.lexer.eat_word("state") {
            self.state()?;
        }
        self.lexer.word("body")?;
        self.graph.body = self.body()?;
        while self.lexer.eat_word("template") {
            self.index("#", self.graph.templates.len())?;
            let name = self.lexer.string()?;
            let body = self.body()?;
            self.graph.templates.push(Template { name, body });
        }
        self.lexer.expect("}")?;
        self.lexer.end()?;
        self.templates_exist()
    }

    /// `layers` nodes come before the templates that they name.
    fn templates_exist(&self) -> Result<(), IrError> {
        let known = self.graph.templates.len();
        for node in &self.graph.nodes {
            if let Op::Layers { template, .. } = node.op
                && template.index() >= known
            {
                let what = format!("layers run template #{}, there are {known}", template.0);
                return Err(IrError::Invalid { graph: self.graph.name.clone(), what });
            }
        }
        Ok(())
    }

    /// The index of a declaration, which counts up from 0.
    fn index(&mut self, sigil: &str, next: usize) -> Result<(), IrError> {
        let mark = self.lexer.mark();
        self.lexer.expect(sigil)?;
        let found = self.lexer.integer()?;
        if found == next as u64 {
            Ok(())
        } else {
            Err(self.lexer.fault_at(mark, &format!("{sigil}{next}"), &format!("{sigil}{found}")))
        }
    }

    fn dtype(&mut self) -> Result<DType, IrError> {
        let mark = self.lexer.mark();
        let word = self.lexer.any_word()?;
        DType::from_str(word).map_err(|_| self.lexer.fault_at(mark, "the name of a storage type", word))
    }

    fn weight(&mut self) -> Result<(), IrError> {
        self.index("@", self.graph.weights.len())?;
        let name = self.lexer.string()?;
        self.lexer.word("persistent")?;
        self.lexer.expect("[")?;
        let mut shape = Vec::new();
        while !self.lexer.eat("]") {
            if !shape.is_empty() {
                self.lexer.expect(",")?;
            }
            shape.push(self.lexer.integer()?);
            self.rank(shape.len())?;
        }
        let mut first_layer = None;
        if self.lexer.eat_word("first_layer") {
            self.lexer.expect("=")?;
            first_layer = Some(self.lexer.small()?);
        }
        let mut slice = None;
        if self.lexer.eat_word("slice") {
            let mark = self.lexer.mark();
            let [axis, first, of] = self.arguments()?;
            let axis = u32::try_from(axis).ok().filter(|axis| (*axis as usize) < shape.len());
            let axis = axis.ok_or_else(|| self.lexer.fault_at(mark, "a dimension of the weight", "another"))?;
            slice = Some(WeightSlice { axis, first, of });
        }
        self.lexer.expect("{")?;
        let mut sources = Vec::new();
        while !self.lexer.eat("}") {
            let dtype = self.dtype()?;
            let transform = self.transform()?;
            let mut tensors = Vec::new();
            while self.lexer.at("\"") {
                tensors.push(self.lexer.string()?);
            }
            sources.push(WeightSource { dtype, tensors, transform });
        }
        self.graph.add_weight(WeightDecl { name, shape, sources, first_layer, slice });
        Ok(())
    }

    fn rank(&self, rank: usize) -> Result<(), IrError> {
        if rank <= MAX_RANK {
            return Ok(());
        }
        let mark = self.lexer.mark();
        Err(self.lexer.fault_at(mark, &format!("at most {MAX_RANK} dimensions"), "more"))
    }

    /// `(a,b,..)` of a fixed length.
    fn arguments<const N: usize>(&mut self) -> Result<[u64; N], IrError> {
        let mut values = [0; N];
        self.lexer.expect("(")?;
        for (i, value) in values.iter_mut().enumerate() {
            if i > 0 {
                self.lexer.expect(",")?;
            }
            *value = self.lexer.integer()?;
        }
        self.lexer.expect(")")?;
        Ok(values)
    }

    /// The same of numbers below 2^32.
    fn small_arguments<const N: usize>(&mut self) -> Result<[u32; N], IrError> {
        let mark = self.lexer.mark();
        let mut small = [0; N];
        for (to, from) in small.iter_mut().zip(self.arguments::<N>()?) {
            *to =
                u32::try_from(from).map_err(|_| self.lexer.fault_at(mark, "a number below 2^32", &from.to_string()))?;
        }
        Ok(small)
    }

    fn transform(&mut self) -> Result<Transform, IrError> {
        let mark = self.lexer.mark();
        Ok(match self.lexer.any_word()? {
            "as_stored" => Transform::AsStored,
            "stack" => Transform::Stack,
            "to_f32" => Transform::ToF32,
            "rows" => {
                let [first] = self.arguments()?;
                Transform::Rows { first }
            }
            "expert_rows" => {
                let [first] = self.arguments()?;
                Transform::ExpertRows { first }
            }
            "merge_kv_b" => {
                let [num_heads, nope_dim, value_dim] = self.arguments()?;
                Transform::MergeKvB { num_heads, nope_dim, value_dim }
            }
            other => return Err(self.lexer.fault_at(mark, "a transform of tensors", other)),
        })
    }

    fn state(&mut self) -> Result<(), IrError> {
        self.index("$", self.graph.states.len())?;
        let name = self.lexer.string()?;
        self.lexer.word("dynamic")?;
        let dtype = self.dtype()?;
        let layout = if self.lexer.eat_word("split") {
            let [num_key_value_heads, head_dim, value_dim] = self.small_arguments()?;
            StateLayout::Split { num_key_value_heads, head_dim, value_dim }
        } else {
            self.lexer.word("joined")?;
            let [latent_dim, rope_dim] = self.small_arguments()?;
            StateLayout::Joined { latent_dim, rope_dim }
        };
        let growth = if self.lexer.eat_word("fixed") {
            GrowthPattern::Fixed
        } else {
            self.lexer.word("per_block")?;
            let [tokens] = self.small_arguments()?;
            GrowthPattern::PerBlock { tokens }
        };
        self.lexer.word("layers")?;
        self.lexer.expect("=")?;
        let first_layer = self.lexer.small()?;
        self.lexer.expect("+")?;
        let layers = self.lexer.small()?;
        self.graph.add_state(StateDecl { name, dtype, layout, growth, first_layer, layers });
        Ok(())
    }

    fn body(&mut self) -> Result<Body, IrError> {
        let mut body = Body::default();
        self.lexer.expect("(")?;
        while !self.lexer.eat(")") {
            if !body.params.is_empty() {
                self.lexer.expect(",")?;
            }
            let (mark, name) = self.lexer.value()?;
            self.lexer.expect(":")?;
            let ty = self.tensor_type()?;
            let value = self.graph.add_value(ty, MemoryScope::Temporary, None);
            self.define(mark, name, value)?;
            body.params.push(value);
        }
        self.lexer.expect("{")?;
        while !self.lexer.eat_word("return") {
            body.nodes.push(self.node()?);
        }
        while self.lexer.at("%") {
            body.results.push(self.operand()?);
            if !self.lexer.eat(",") {
                break;
            }
        }
        self.lexer.expect("}")?;
        Ok(body)
    }

    fn define(&mut self, mark: Mark, name: u32, value: ValueId) -> Result<(), IrError> {
        match self.values.insert(name, value) {
            None => Ok(()),
            Some(_) => Err(self.lexer.fault_at(mark, "a value that is not defined yet", &format!("%{name}"))),
        }
    }

    fn operand(&mut self) -> Result<ValueId, IrError> {
        let (mark, name) = self.lexer.value()?;
        self.values
            .get(&name)
            .copied()
            .ok_or_else(|| self.lexer.fault_at(mark, "a value defined above", &format!("%{name}")))
    }

    fn tensor_type(&mut self) -> Result<TensorType, IrError> {
        let dtype = self.dtype()?;
        self.lexer.expect("[")?;
        let mut shape = Vec::new();
        while !self.lexer.eat("]") {
            if !shape.is_empty() {
                self.lexer.expect(",")?;
            }
            let mark = self.lexer.mark();
            shape.push(if self.lexer.at_digit() {
                Dim::Const(self.lexer.integer()?)
            } else {
                let word = self.lexer.any_word()?;
                Dim::Symbol(spelled(&self.lexer, mark, word, "a size or a symbol", Symbol::from_name(word))?)
            });
            self.rank(shape.len())?;
        }
        Ok(TensorType { dtype, shape })
    }

    fn node(&mut self) -> Result<NodeId, IrError> {
        let mut results = Vec::new();
        if self.lexer.at("%") {
            loop {
                results.push(self.lexer.value()?);
                if !self.lexer.eat(",") {
                    break;
                }
            }
            self.lexer.expect("=")?;
        }
        let mark = self.lexer.mark();
        let kind = self.lexer.any_word()?;
        let mut settings = self.lexer.settings()?;
        let op = self.op(mark, kind, &mut settings)?;
        self.lexer.expect("(")?;
        let mut operands = Vec::new();
        while !self.lexer.eat(")") {
            if !operands.is_empty() {
                self.lexer.expect(",")?;
            }
            operands.push(self.operand()?);
        }
        let mut types = Vec::new();
        let types_mark = self.lexer.mark();
        if self.lexer.eat(":") {
            loop {
                types.push(self.tensor_type()?);
                if !self.lexer.eat(",") {
                    break;
                }
            }
        }
        self.lexer.expect(";")?;
        let origin = self.lexer.string()?;
        let id = self.graph.add_node(op, operands, &origin).map_err(|error| match error {
            IrError::Operand { expected, found, .. } => {
                self.lexer.fault_at(mark, &format!("{kind} with {expected}"), &found)
            }
            other => other,
        })?;
        self.attributes(id, &mut settings)?;
        settings.finish(&self.lexer)?;
        self.results(id, types_mark, &types)?;
        let outputs = self.graph.node(id).outputs.clone();
        if outputs.len() != results.len() {
            let expected = format!("{} results", outputs.len());
            return Err(self.lexer.fault_at(mark, &expected, &results.len().to_string()));
        }
        for ((mark, name), value) in results.into_iter().zip(outputs) {
            self.define(mark, name, value)?;
        }
        Ok(id)
    }

    /// Compares written types with inferred ones; a weight of one layer may be stored in another type than that of layer 0.
    fn results(&mut self, id: NodeId, mark: Mark, written: &[TensorType]) -> Result<(), IrError> {
        let node = self.graph.node(id);
        let inferred: Vec<TensorType> = node.outputs.iter().map(|v| self.graph.value(*v).ty.clone()).collect();
        if inferred == written {
            return Ok(());
        }
        if let (Op::Weight(_), Some(layer), [inferred], [written]) =
            (&node.op, node.attributes.layer, inferred.as_slice(), written)
            && let Op::Weight(weight) = node.op
            && inferred.shape == written.shape
            && self.graph.weight_source(weight, Some(layer)).is_ok_and(|(_, s)| s.dtype == written.dtype)
        {
            if let Some(value) = node.outputs.first().copied() {
                self.graph.values[value.index()].ty.dtype = written.dtype;
            }
            return Ok(());
        }
        let list = |types: &[TensorType]| types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        Err(self.lexer.fault_at(mark, &format!("the inferred types {}", list(&inferred)), &list(written)))
    }

    fn attributes(&mut self, id: NodeId, settings: &mut Settings<'_>) -> Result<(), IrError> {
        let lexer = &self.lexer;
        let attributes = &mut self.graph.node_mut(id).attributes;
        let find = Tolerance::ALL;
        attributes.tolerance = settings.named(lexer, "tolerance", |w| find.into_iter().find(|t| t.name() == w))?;
        attributes.sensitivity =
            settings.named(lexer, "sensitivity", |w| Sensitivity::ALL.into_iter().find(|s| s.name() == w))?;
        if let Some(setting) = settings.take("compute") {
            for word in setting.list(lexer)? {
                let compute = Compute::ALL.into_iter().find(|c| c.name() == *word);
                attributes.compute.push(spelled(lexer, setting.mark, word, "a form of products", compute)?);
            }
        }
        if let Some(setting) = settings.take("sums") {
            let mark = setting.mark;
            let text = setting.text(lexer)?;
            attributes.sums = spelled(lexer, mark, &text, "f32, f16 or f16/SPAN", text.parse().ok())?;
        }
        if settings.has("phase") {
            attributes.phase =
                Some(settings.named(lexer, "phase", |w| Phase::ALL.into_iter().find(|p| p.name() == w))?);
        }
        attributes.tiling = settings.take("tiling").map(|s| s.text(lexer)).transpose()?;
        attributes.layer = settings.take("layer").map(|s| s.number(lexer)).transpose()?;
        Ok(())
    }

    /// A reference to a declaration that exists.
    fn reference(&self, setting: &Setting<'_>, sigil: char, declared: usize) -> Result<u32, IrError> {
        let id = setting.reference(&self.lexer, sigil)?;
        if (id as usize) < declared {
            return Ok(id);
        }
        let expected = format!("a declaration below {sigil}{declared}");
        Err(self.lexer.fault_at(setting.mark, &expected, &format!("{sigil}{id}")))
    }

    fn op(&self, mark: Mark, kind: &str, s: &mut Settings<'_>) -> Result<Op, IrError> {
        let lexer = &self.lexer;
        let state = |s: &mut Settings<'_>| {
            let setting = s.required(lexer, "state")?;
            self.reference(&setting, '$', self.graph.states.len()).map(StateId)
        };
        Ok(match kind {
            "input" => {
                let name = s.named(lexer, "name", |w| inputs::ALL.into_iter().find(|n| *n == w))?;
                Op::Input { name }
            }
            "weight" => {
                let setting = s.required(lexer, "weight")?;
                Op::Weight(WeightId(self.reference(&setting, '@', self.graph.weights.len())?))
            }
            "const" => {
                let setting = s.required(lexer, "data")?;
                let mut data = Vec::new();
                for word in setting.list(lexer)? {
                    let x = word.parse::<f32>().ok().filter(|x| x.is_finite());
                    data.push(spelled(lexer, setting.mark, word, "a finite number", x)?);
                }
                Op::Const { data }
            }
            "embed" => Op::Embed,
            "gather_rows" => Op::GatherRows,
            "cast" => Op::Cast,
            "softmax" => Op::Softmax,
            "all_reduce" => Op::AllReduce { ranks: s.number(lexer, "ranks")? },
            "gemm" => Op::Gemm {
                gemm_type: s.named(lexer, "type", GemmType::from_name)?,
                biases: s.flags(lexer, "biases")?,
                scales: s.flags(lexer, "scales")?,
                epilogue: s.named(lexer, "epilogue", epilogue)?,
            },
            "grouped_gemm" => Op::GroupedGemm {
                num_experts: s.number(lexer, "num_experts")?,
                top_k: s.number(lexer, "top_k")?,
                gather: s.flag(lexer, "gather")?,
                scales: s.flags(lexer, "scales")?,
                epilogue: s.named(lexer, "epilogue", epilogue)?,
            },
            "norm" => Op::Norm { eps: s.float(lexer, "eps")?, axis: s.number(lexer, "axis")? },
            "rope" => Op::Rope(Rope {
                num_heads: s.number(lexer, "num_heads")?,
                head_dim: s.number(lexer, "head_dim")?,
                rotary_offset: s.number(lexer, "rotary_offset")?,
                rotary_dim: s.number(lexer, "rotary_dim")?,
                style: s.named(lexer, "style", RopeStyle::from_name)?,
                attention_factor: s.float(lexer, "attention_factor")?,
            }),
            "glu" => Op::Glu(s.named(lexer, "function", Activation::from_name)?),
            "unary" => Op::Unary(s.named(lexer, "function", Activation::from_name)?),
            "binary" => Op::Binary(s.named(lexer, "function", BinaryFunction::from_name)?),
            "kv_append" => Op::KvAppend { state: state(s)? },
            "attention" => Op::Attention {
                state: state(s)?,
                attention: Attention {
                    num_heads: s.number(lexer, "num_heads")?,
                    num_key_value_heads: s.number(lexer, "num_key_value_heads")?,
                    head_dim: s.number(lexer, "head_dim")?,
                    value_dim: s.number(lexer, "value_dim")?,
                    scale: s.float(lexer, "scale")?,
                    window: s.number(lexer, "window")?,
                },
            },
            "mla_attention" => Op::MlaAttention {
                state: state(s)?,
                attention: MlaAttention {
                    num_heads: s.number(lexer, "num_heads")?,
                    nope_dim: s.number(lexer, "nope_dim")?,
                    rope_dim: s.number(lexer, "rope_dim")?,
                    value_dim: s.number(lexer, "value_dim")?,
                    latent_dim: s.number(lexer, "latent_dim")?,
                    scale: s.float(lexer, "scale")?,
                    form: s.named(lexer, "form", |w| {
                        if w == "any" { Some(None) } else { MlaForm::from_name(w).map(Some) }
                    })?,
                },
            },
            "route" => Op::Route {
                route: Route {
                    score: s.named(lexer, "score", RouterScore::from_name)?,
                    num_experts: s.number(lexer, "num_experts")?,
                    top_k: s.number(lexer, "top_k")?,
                    num_groups: s.number(lexer, "num_groups")?,
                    topk_group: s.number(lexer, "topk_group")?,
                    group_score: s.named(lexer, "group_score", GroupScore::from_name)?,
                    renormalise: s.flag(lexer, "renormalise")?,
                    scale: s.float(lexer, "scale")?,
                },
                bias: s.flag(lexer, "bias")?,
            },
            "dispatch" => Op::Dispatch { num_experts: s.number(lexer, "num_experts")? },
            "combine" => Op::Combine { addend: s.flag(lexer, "addend")? },
            "columns" => Op::Columns { offset: s.number(lexer, "offset")?, width: s.number(lexer, "width")? },
            "layers" => {
                let setting = s.required(lexer, "template")?;
                Op::Layers {
                    template: TemplateId(setting.reference(lexer, '#')?),
                    first: s.number(lexer, "first")?,
                    count: s.number(lexer, "count")?,
                }
            }
            other => return Err(lexer.fault_at(mark, "the name of an op", other)),
        })
    }
}

fn epilogue(word: &str) -> Option<Epilogue> {
    match word {
        "none" => Some(Epilogue::None),
        "add" => Some(Epilogue::Add),
        other => other.strip_prefix("glu_").and_then(Activation::from_name).map(Epilogue::Glu),
    }
}
