//! Building bodies: the type rule of every op, and a builder with one method per op.

use qwen_formats::DType;

use crate::{
    Activation, Attention, Attributes, BinaryFunction, Body, Dim, Epilogue, GemmType, Graph, IrError, MemoryScope,
    MlaAttention, Op, Rope, Route, Sensitivity, StateId, Sums, Symbol, TemplateId, TensorType, Tolerance, ValueId,
    WeightId,
};

fn fault(op: &Op, expected: impl Into<String>, found: impl Into<String>) -> IrError {
    IrError::Operand { op: op.name(), origin: String::new(), expected: expected.into(), found: found.into() }
}

/// Operand types of a node under construction.
struct Operands<'a> {
    op: &'a Op,
    types: Vec<&'a TensorType>,
}

impl<'a> Operands<'a> {
    fn get(&self, i: usize) -> Result<&'a TensorType, IrError> {
        self.types
            .get(i)
            .copied()
            .ok_or_else(|| fault(self.op, format!("at least {} operands", i + 1), self.types.len().to_string()))
    }
    fn count(&self, n: usize) -> Result<(), IrError> {
        if self.types.len() == n {
            Ok(())
        } else {
            Err(fault(self.op, format!("{n} operands"), self.types.len().to_string()))
        }
    }
    /// Rows and columns of operand `i`, a matrix with a constant number of columns.
    fn matrix(&self, i: usize) -> Result<(Dim, u64), IrError> {
        let ty = self.get(i)?;
        match (ty.shape.as_slice(), ty.columns()) {
            ([rows, _], Some(columns)) => Ok((*rows, columns)),
            _ => Err(fault(self.op, format!("operand {i} to be a matrix with constant columns"), ty.to_string())),
        }
    }
    /// Outer sizes and the constant row size of operand `i`, which has two dimensions or more.
    fn rows(&self, i: usize) -> Result<(&'a [Dim], u64), IrError> {
        let ty = self.get(i)?;
        match (ty.shape.split_last(), ty.columns()) {
            (Some((_, rows)), Some(columns)) if !rows.is_empty() => Ok((rows, columns)),
            _ => Err(fault(self.op, format!("operand {i} with rows of constant size"), ty.to_string())),
        }
    }
    fn columns(&self, i: usize, wanted: u64) -> Result<Dim, IrError> {
        let (rows, columns) = self.matrix(i)?;
        if columns == wanted {
            Ok(rows)
        } else {
            Err(fault(self.op, format!("operand {i} to have {wanted} columns"), columns.to_string()))
        }
    }
    /// Columns of operand `i`, a matrix with the given rows.
    fn columns_of_rows(&self, i: usize, wanted: Dim) -> Result<u64, IrError> {
        let (rows, columns) = self.matrix(i)?;
        if rows == wanted {
            Ok(columns)
        } else {
            Err(fault(self.op, format!("operand {i} with {wanted} rows"), rows.to_string()))
        }
    }
    fn shape(&self, i: usize, wanted: &[Dim]) -> Result<(), IrError> {
        let ty = self.get(i)?;
        if ty.shape == wanted {
            Ok(())
        } else {
            let wanted: Vec<String> = wanted.iter().map(ToString::to_string).collect();
            Err(fault(self.op, format!("operand {i} of shape [{}]", wanted.join(",")), ty.to_string()))
        }
    }
}

fn f32_type(shape: impl IntoIterator<Item = Dim>) -> TensorType {
    TensorType::new(DType::F32, shape)
}
fn i32_type(shape: impl IntoIterator<Item = Dim>) -> TensorType {
    TensorType::new(DType::I32, shape)
}

/// Types of the results of an op over the given operands.
pub(crate) fn result_types(graph: &Graph, op: &Op, inputs: &[ValueId]) -> Result<Vec<TensorType>, IrError> {
    let types = inputs.iter().map(|id| &graph.value(*id).ty).collect();
    let operands = Operands { op, types };
    Ok(match op {
        Op::Input { name } => {
            operands.count(0)?;
            vec![input_type(name).ok_or_else(|| fault(op, "a known input", *name))?]
        }
        Op::Weight(id) => {
            operands.count(0)?;
            let decl = graph.weight(*id);
            let dtype = decl.sources.first().map_or(DType::F32, |s| s.dtype);
            vec![TensorType::new(dtype, decl.shape.iter().map(|n| Dim::Const(*n)))]
        }
        Op::Const { data } => {
            operands.count(0)?;
            vec![f32_type([Dim::Const(data.len() as u64)])]
        }
        Op::Embed => {
            operands.count(2)?;
            let ids = operands.get(0)?;
            let (_, hidden) = operands.matrix(1)?;
            let rows = *ids.shape.first().ok_or_else(|| fault(op, "ids with one dimension", ids.to_string()))?;
            vec![f32_type([rows, hidden.into()])]
        }
        Op::GatherRows => {
            operands.count(2)?;
            let (_, hidden) = operands.matrix(0)?;
            let rows = operands.get(1)?;
            let rows = *rows.shape.first().ok_or_else(|| fault(op, "row indices", rows.to_string()))?;
            vec![f32_type([rows, hidden.into()])]
        }
        Op::Gemm { .. } => vec![gemm_type(&operands)?],
        Op::GroupedGemm { .. } => vec![grouped_gemm_type(&operands)?],
        Op::Norm { axis, .. } => {
            operands.count(2)?;
            let (rows, width) = operands.matrix(0)?;
            operands.shape(1, &[constant(*axis)])?;
            if *axis == 0 || width % u64::from(*axis) != 0 {
                return Err(fault(op, format!("columns divisible by the axis {axis}"), width.to_string()));
            }
            vec![f32_type([rows, width.into()])]
        }
        Op::Rope(rope) => vec![rope_type(&operands, rope)?],
        Op::Glu(_) => {
            operands.count(2)?;
            let (rows, width) = operands.rows(0)?;
            let shape: Vec<Dim> = rows.iter().copied().chain([width.into()]).collect();
            operands.shape(1, &shape)?;
            vec![f32_type(shape)]
        }
        Op::Binary(_) => {
            operands.count(2)?;
            let (rows, width) = operands.rows(0)?;
            let (other_rows, other_width) = operands.rows(1)?;
            if other_rows != rows || (other_width != width && other_width != 1) {
                let expected = format!("operand 1 like operand 0, {}, or with one column", operands.get(0)?);
                return Err(fault(op, expected, operands.get(1)?.to_string()));
            }
            vec![f32_type(rows.iter().copied().chain([width.into()]))]
        }
        Op::Unary(_) | Op::Softmax | Op::AllReduce { .. } => {
            operands.count(1)?;
            vec![operands.get(0)?.clone()]
        }
        Op::Cast => {
            operands.count(1)?;
            let mut ty = operands.get(0)?.clone();
            ty.dtype = DType::F32;
            vec![ty]
        }
        Op::KvAppend { state } => {
            operands.count(3)?;
            let (rows, _) = operands.matrix(0)?;
            let elements = operands.matrix(0)?.1.saturating_add(operands.columns_of_rows(1, rows)?);
            let wanted = graph.state(*state).layout.elements_per_token();
            operands.shape(2, &[rows])?;
            if elements != wanted {
                return Err(fault(op, format!("{wanted} elements per token"), elements.to_string()));
            }
            vec![]
        }
        Op::Attention { attention, .. } => vec![attention_type(&operands, attention)?],
        Op::MlaAttention { attention, .. } => vec![mla_attention_type(&operands, attention)?],
        Op::Route { route, bias } => route_types(&operands, route, *bias)?,
        Op::Dispatch { num_experts } => {
            operands.count(1)?;
            let ids = operands.get(0)?;
            let sorted = i32_type(ids.shape.iter().copied());
            vec![i32_type([Dim::Const(u64::from(*num_experts) + 1)]), sorted.clone(), sorted]
        }
        Op::Combine { addend } => {
            operands.count(if *addend { 4 } else { 3 })?;
            let x = operands.get(0)?;
            let [rows, _, width] = *x.shape.as_slice() else {
                return Err(fault(op, "[T, k, H]", x.to_string()));
            };
            if *addend {
                operands.shape(3, &[rows, width])?;
            }
            vec![f32_type([rows, width])]
        }
        Op::Columns { offset, width } => vec![columns_type(&operands, *offset, *width)?],
        Op::Layers { .. } => vec![operands.get(0)?.clone()],
    })
}

fn constant(n: u32) -> Dim {
    Dim::Const(u64::from(n))
}

fn rope_type(operands: &Operands<'_>, rope: &Rope) -> Result<TensorType, IrError> {
    operands.count(3)?;
    let width = u64::from(rope.num_heads) * u64::from(rope.head_dim);
    let rows = operands.columns(0, width)?;
    operands.shape(1, &[rows])?;
    operands.shape(2, &[constant(rope.rotary_dim / 2)])?;
    if !rope.rotary_dim.is_multiple_of(2)
        || u64::from(rope.rotary_offset) + u64::from(rope.rotary_dim) > u64::from(rope.head_dim)
    {
        return Err(fault(
            operands.op,
            format!("an even rotary range within {} elements", rope.head_dim),
            format!("{} from {}", rope.rotary_dim, rope.rotary_offset),
        ));
    }
    Ok(f32_type([rows, width.into()]))
}

fn attention_type(operands: &Operands<'_>, attention: &Attention) -> Result<TensorType, IrError> {
    operands.count(4)?;
    let rows = operands.columns(0, u64::from(attention.num_heads) * u64::from(attention.head_dim))?;
    paging(operands, 1)?;
    if attention.num_key_value_heads == 0 || !attention.num_heads.is_multiple_of(attention.num_key_value_heads) {
        return Err(fault(
            operands.op,
            format!("{} query heads divisible by the key/value heads", attention.num_heads),
            attention.num_key_value_heads.to_string(),
        ));
    }
    let width = u64::from(attention.num_heads) * u64::from(attention.value_dim);
    Ok(f32_type([rows, width.into()]))
}

fn mla_attention_type(operands: &Operands<'_>, a: &MlaAttention) -> Result<TensorType, IrError> {
    operands.count(5)?;
    let heads = u64::from(a.num_heads);
    let all_heads = |x: u32, y: u32| heads.saturating_mul(u64::from(x) + u64::from(y));
    let rows = operands.columns(0, all_heads(a.nope_dim, a.rope_dim))?;
    let kv_b = [Dim::Const(all_heads(a.nope_dim, a.value_dim)), constant(a.latent_dim)];
    operands.shape(1, &kv_b)?;
    paging(operands, 2)?;
    Ok(f32_type([rows, (heads * u64::from(a.value_dim)).into()]))
}

fn route_types(operands: &Operands<'_>, route: &Route, bias: bool) -> Result<Vec<TensorType>, IrError> {
    operands.count(if bias { 2 } else { 1 })?;
    let rows = operands.columns(0, u64::from(route.num_experts))?;
    if bias {
        operands.shape(1, &[constant(route.num_experts)])?;
    }
    if route.top_k == 0
        || route.num_groups == 0
        || !route.num_experts.is_multiple_of(route.num_groups)
        || route.topk_group > route.num_groups
        || u64::from(route.top_k) > u64::from(route.num_experts / route.num_groups) * u64::from(route.topk_group)
    {
        return Err(fault(operands.op, "top_k experts available in the chosen groups", format!("{route:?}")));
    }
    Ok(vec![i32_type([rows, constant(route.top_k)]), f32_type([rows, constant(route.top_k)])])
}

fn columns_type(operands: &Operands<'_>, offset: u32, width: u32) -> Result<TensorType, IrError> {
    operands.count(1)?;
    let (rows, all) = operands.rows(0)?;
    let dtype = operands.get(0)?.dtype;
    let end = u64::from(offset) + u64::from(width);
    if end > all || width == 0 {
        return Err(fault(operands.op, format!("columns below {all}"), format!("{offset}..{end}")));
    }
    if dtype.is_block_quantised() {
        return Err(fault(operands.op, "values of a plain type", dtype.name()));
    }
    Ok(TensorType::new(dtype, rows.iter().copied().chain([constant(width)])))
}

fn paging(operands: &Operands<'_>, first: usize) -> Result<(), IrError> {
    operands.shape(first, &[Dim::Symbol(Symbol::Sequences)])?;
    operands.shape(first + 1, &[Dim::Symbol(Symbol::Sequences)])?;
    operands.shape(first + 2, &[Dim::Symbol(Symbol::Sequences), Dim::Symbol(Symbol::Blocks)])
}

fn gemm_type(operands: &Operands<'_>) -> Result<TensorType, IrError> {
    let Op::Gemm { biases, scales, epilogue, .. } = operands.op else {
        return Err(fault(operands.op, "gemm", operands.op.name()));
    };
    let (rows, depth) = operands.matrix(0)?;
    let mut next = 1;
    let mut widths = Vec::with_capacity(scales.len());
    for scaled in scales {
        let (n, k) = operands.matrix(next)?;
        if k != depth {
            return Err(fault(operands.op, format!("weight of {depth} inputs"), k.to_string()));
        }
        widths.push(n.constant().ok_or_else(|| fault(operands.op, "constant outputs", n.to_string()))?);
        next += 1 + usize::from(*scaled);
    }
    if biases.len() != widths.len() || widths.is_empty() {
        return Err(fault(operands.op, "one bias flag per segment", format!("{} flags", biases.len())));
    }
    for (width, bias) in widths.iter().zip(biases) {
        if *bias {
            operands.shape(next, &[Dim::Const(*width)])?;
            next += 1;
        }
    }
    let total = output_width(operands.op, &widths, *epilogue)?;
    if *epilogue == Epilogue::Add {
        operands.shape(next, &[rows, total.into()])?;
        next += 1;
    }
    operands.count(next)?;
    Ok(f32_type([rows, total.into()]))
}

fn output_width(op: &Op, widths: &[u64], epilogue: Epilogue) -> Result<u64, IrError> {
    match (epilogue, widths) {
        (Epilogue::Glu(_), [a, b]) if a == b => Ok(*a),
        (Epilogue::Glu(_), _) => Err(fault(op, "two equal segments for a glu", format!("{widths:?}"))),
        _ => Ok(widths.iter().fold(0, |sum, n| sum.saturating_add(*n))),
    }
}

fn grouped_gemm_type(operands: &Operands<'_>) -> Result<TensorType, IrError> {
    let Op::GroupedGemm { num_experts, top_k, gather, scales, epilogue } = operands.op else {
        return Err(fault(operands.op, "grouped_gemm", operands.op.name()));
    };
    let x = operands.get(0)?;
    let (rows, depth) = match (gather, x.shape.as_slice()) {
        (true, [rows, Dim::Const(depth)]) => (*rows, *depth),
        (false, [rows, Dim::Const(k), Dim::Const(depth)]) if k == &u64::from(*top_k) => (*rows, *depth),
        _ => return Err(fault(operands.op, "x [T, K] with gather, [T, k, K] without", x.to_string())),
    };
    operands.shape(1, &[Dim::Const(u64::from(*num_experts) + 1)])?;
    let mut next = 2;
    if *gather {
        operands.shape(2, &[rows, Dim::Const(u64::from(*top_k))])?;
        next = 3;
    }
    let mut widths = Vec::with_capacity(scales.len());
    for scaled in scales {
        let weight = operands.get(next)?;
        match weight.shape.as_slice() {
            [Dim::Const(e), Dim::Const(n), Dim::Const(k)] if e == &u64::from(*num_experts) && *k == depth => {
                widths.push(*n);
            }
            _ => return Err(fault(operands.op, format!("weight [{num_experts}, N, {depth}]"), weight.to_string())),
        }
        next += 1 + usize::from(*scaled);
    }
    operands.count(next)?;
    let total = output_width(operands.op, &widths, *epilogue)?;
    Ok(f32_type([rows, Dim::Const(u64::from(*top_k)), total.into()]))
}

/// Type of a named input.
fn input_type(name: &str) -> Option<TensorType> {
    use crate::inputs as i;
    let shape = match name {
        i::TOKEN_IDS | i::POSITIONS | i::SLOTS => vec![Dim::Symbol(Symbol::Tokens)],
        i::QUERY_START | i::CONTEXT_LEN => vec![Dim::Symbol(Symbol::Sequences)],
        i::BLOCK_TABLE => vec![Dim::Symbol(Symbol::Sequences), Dim::Symbol(Symbol::Blocks)],
        i::LOGIT_ROWS => vec![Dim::Symbol(Symbol::Rows)],
        _ => return None,
    };
    Some(i32_type(shape))
}

/// What an op may differ by and how much it matters, before any pass.
pub(crate) fn default_attributes(op: &Op, origin: &str) -> Attributes {
    let tolerance = match op {
        Op::Input { .. }
        | Op::Weight(_)
        | Op::Const { .. }
        | Op::Embed
        | Op::GatherRows
        | Op::Columns { .. }
        | Op::Dispatch { .. } => Tolerance::Exact,
        Op::Gemm { .. } | Op::GroupedGemm { .. } => Tolerance::Loose,
        Op::KvAppend { .. } | Op::Attention { .. } | Op::MlaAttention { .. } => Tolerance::Normal,
        Op::Layers { .. } => Tolerance::Statistical,
        _ => Tolerance::Tight,
    };
    let sensitivity = match op {
        Op::Norm { .. } | Op::Rope(_) | Op::Route { .. } | Op::Softmax | Op::Const { .. } => Sensitivity::High,
        Op::Gemm { gemm_type: GemmType::LmHead, .. } => Sensitivity::High,
        _ => Sensitivity::Normal,
    };
    Attributes {
        tolerance,
        sensitivity,
        compute: Vec::new(),
        sums: Sums::F32,
        phase: None,
        tiling: None,
        layer: None,
        origin: origin.to_owned(),
    }
}

/// A weight with its optional companions, for [`BodyBuilder::gemm`].
#[derive(Debug, Clone, Copy)]
pub struct Linear {
    /// `[N, K]`, or `[E, N, K]`.
    pub weight: ValueId,
    /// Block scales.
    pub scale: Option<ValueId>,
    /// `[N]`.
    pub bias: Option<ValueId>,
}

/// Appends nodes to one body.
#[derive(Debug)]
pub struct BodyBuilder<'g> {
    /// The graph under construction.
    pub graph: &'g mut Graph,
    body: Body,
    origin: String,
}

impl<'g> BodyBuilder<'g> {
    /// An empty body with parameters of the given types.
    pub fn new(graph: &'g mut Graph, params: &[TensorType]) -> Self {
        let params =
            params.iter().map(|ty| graph.add_value(ty.clone(), MemoryScope::Temporary, None)).collect::<Vec<_>>();
        Self { graph, body: Body { params, ..Body::default() }, origin: String::new() }
    }
    /// Parameter `i`.
    #[must_use]
    pub fn param(&self, i: usize) -> ValueId {
        self.body.params[i]
    }
    /// Part of the model that the following nodes belong to.
    pub fn origin(&mut self, origin: impl Into<String>) -> &mut Self {
        self.origin = origin.into();
        self
    }
    /// Ends the body.
    #[must_use]
    pub fn finish(mut self, results: Vec<ValueId>) -> Body {
        self.body.results = results;
        self.body
    }
    /// Appends any node.
    ///
    /// # Errors
    /// If operands do not fit the op; the message names the origin.
    pub fn node(&mut self, op: Op, inputs: Vec<ValueId>) -> Result<Vec<ValueId>, IrError> {
        let id = self.graph.add_node(op, inputs, &self.origin).map_err(|error| match error {
            IrError::Operand { op, expected, found, .. } => {
                IrError::Operand { op, origin: self.origin.clone(), expected, found }
            }
            other => other,
        })?;
        self.body.nodes.push(id);
        Ok(self.graph.node(id).outputs.clone())
    }
    fn one(&mut self, op: Op, inputs: Vec<ValueId>) -> Result<ValueId, IrError> {
        let outputs = self.node(op, inputs)?;
        outputs.first().copied().ok_or_else(|| IrError::Invalid {
            graph: self.graph.name.clone(),
            what: format!("a node of {} has no result", self.origin),
        })
    }
    /// Sensitivity of the node appended last.
    pub fn sensitivity(&mut self, sensitivity: Sensitivity) {
        if let Some(id) = self.body.nodes.last() {
            self.graph.node_mut(*id).attributes.sensitivity = sensitivity;
        }
    }
    /// A named input, see [`crate::inputs`].
    ///
    /// # Errors
    /// If the name is unknown.
    pub fn input(&mut self, name: &'static str) -> Result<ValueId, IrError> {
        self.one(Op::Input { name }, vec![])
    }
    /// A weight (in a template: of the current layer).
    ///
    /// # Errors
    /// Never for a declared weight.
    pub fn weight(&mut self, id: WeightId) -> Result<ValueId, IrError> {
        self.one(Op::Weight(id), vec![])
    }
    /// A computed table.
    ///
    /// # Errors
    /// Never.
    pub fn constant(&mut self, data: Vec<f32>) -> Result<ValueId, IrError> {
        self.one(Op::Const { data }, vec![])
    }
    /// Rows of a table.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn embed(&mut self, ids: ValueId, table: ValueId) -> Result<ValueId, IrError> {
        self.one(Op::Embed, vec![ids, table])
    }
    /// Selected rows.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn gather_rows(&mut self, x: ValueId, rows: ValueId) -> Result<ValueId, IrError> {
        self.one(Op::GatherRows, vec![x, rows])
    }
    /// A linear layer with one or more segments.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn gemm(&mut self, gemm_type: GemmType, x: ValueId, linears: &[Linear]) -> Result<ValueId, IrError> {
        let mut inputs = vec![x];
        for linear in linears {
            inputs.push(linear.weight);
            inputs.extend(linear.scale);
        }
        inputs.extend(linears.iter().filter_map(|l| l.bias));
        let op = Op::Gemm {
            gemm_type,
            biases: linears.iter().map(|l| l.bias.is_some()).collect(),
            scales: linears.iter().map(|l| l.scale.is_some()).collect(),
            epilogue: Epilogue::None,
        };
        self.one(op, inputs)
    }
    /// Experts over sorted rows; `rows` gives the source row of each sorted row.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn grouped_gemm(
        &mut self,
        (num_experts, top_k): (u32, u32),
        x: ValueId,
        offsets: ValueId,
        rows: Option<ValueId>,
        linears: &[Linear],
    ) -> Result<ValueId, IrError> {
        let mut inputs = vec![x, offsets];
        inputs.extend(rows);
        for linear in linears {
            inputs.push(linear.weight);
            inputs.extend(linear.scale);
        }
        let scales = linears.iter().map(|l| l.scale.is_some()).collect();
        let op = Op::GroupedGemm { num_experts, top_k, gather: rows.is_some(), scales, epilogue: Epilogue::None };
        self.one(op, inputs)
    }
    /// Root-mean-square norm over groups of `axis` elements.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn norm(&mut self, x: ValueId, weight: ValueId, eps: f64, axis: u32) -> Result<ValueId, IrError> {
        self.one(Op::Norm { eps, axis }, vec![x, weight])
    }
    /// Rotary embedding.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn rope(&mut self, x: ValueId, positions: ValueId, inv_freq: ValueId, rope: Rope) -> Result<ValueId, IrError> {
        self.one(Op::Rope(rope), vec![x, positions, inv_freq])
    }
    /// act(a) * b.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn glu(&mut self, activation: Activation, a: ValueId, b: ValueId) -> Result<ValueId, IrError> {
        self.one(Op::Glu(activation), vec![a, b])
    }
    /// a (f) b.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn binary(&mut self, function: BinaryFunction, a: ValueId, b: ValueId) -> Result<ValueId, IrError> {
        self.one(Op::Binary(function), vec![a, b])
    }
    /// f(x).
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn unary(&mut self, function: Activation, x: ValueId) -> Result<ValueId, IrError> {
        self.one(Op::Unary(function), vec![x])
    }
    /// Columns of each row.
    ///
    /// # Errors
    /// If the range is outside.
    pub fn columns(&mut self, x: ValueId, offset: u32, width: u32) -> Result<ValueId, IrError> {
        self.one(Op::Columns { offset, width }, vec![x])
    }
    /// Writes keys and values to the cache.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn kv_append(&mut self, state: StateId, k: ValueId, v: ValueId, slots: ValueId) -> Result<(), IrError> {
        self.node(Op::KvAppend { state }, vec![k, v, slots]).map(|_| ())
    }
    /// Attention over the cache; `paging` = query_start, context_len, block_table.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn attention(
        &mut self,
        state: StateId,
        attention: Attention,
        q: ValueId,
        paging: [ValueId; 3],
    ) -> Result<ValueId, IrError> {
        let [start, len, table] = paging;
        self.one(Op::Attention { state, attention }, vec![q, start, len, table])
    }
    /// Latent attention over the cache; `paging` = query_start, context_len, block_table.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn mla_attention(
        &mut self,
        state: StateId,
        attention: MlaAttention,
        q: ValueId,
        kv_b: ValueId,
        paging: [ValueId; 3],
    ) -> Result<ValueId, IrError> {
        let [start, len, table] = paging;
        self.one(Op::MlaAttention { state, attention }, vec![q, kv_b, start, len, table])
    }
    /// Chosen experts and their weights.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn route(
        &mut self,
        route: Route,
        logits: ValueId,
        bias: Option<ValueId>,
    ) -> Result<(ValueId, ValueId), IrError> {
        let mut inputs = vec![logits];
        inputs.extend(bias);
        match self.node(Op::Route { route, bias: bias.is_some() }, inputs)?.as_slice() {
            [ids, weights] => Ok((*ids, *weights)),
            other => Err(IrError::Invalid { graph: self.graph.name.clone(), what: format!("route gave {other:?}") }),
        }
    }
    /// Offsets, rows, slots of the rows sorted by expert.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn dispatch(&mut self, num_experts: u32, ids: ValueId) -> Result<[ValueId; 3], IrError> {
        match self.node(Op::Dispatch { num_experts }, vec![ids])?.as_slice() {
            [offsets, rows, slots] => Ok([*offsets, *rows, *slots]),
            other => Err(IrError::Invalid { graph: self.graph.name.clone(), what: format!("dispatch gave {other:?}") }),
        }
    }
    /// Weighted sum of the experts' results, plus an addend.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn combine(
        &mut self,
        x: ValueId,
        slots: ValueId,
        weights: ValueId,
        addend: Option<ValueId>,
    ) -> Result<ValueId, IrError> {
        let mut inputs = vec![x, slots, weights];
        inputs.extend(addend);
        self.one(Op::Combine { addend: addend.is_some() }, inputs)
    }
    /// `count` layers of a template.
    ///
    /// # Errors
    /// If shapes do not fit.
    pub fn layers(&mut self, template: TemplateId, first: u32, count: u32, x: ValueId) -> Result<ValueId, IrError> {
        self.one(Op::Layers { template, first, count }, vec![x])
    }
}
