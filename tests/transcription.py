"""GSM and its baseline, transcribed: one position, one head, one entry at a time, from the equations alone.

It shares no code with the models under test and is slow: a reader compares it with the paper, and tests compare it with
the models in float64. The parts that the paper adopts from DeepSeek-V4.1-Flash follow that report (causal
encoder-decoder 2.2, CSA2 and its indexer 2.3, single-pass mHC); mHC itself follows Xie et al. 2025. Numbers in brackets
are the paper's equations. Where the paper leaves a point open, `Geometry` has the choice: `stage_input`,
`decoder_start`, `residual`.

Letters: T positions of a document, F finished groups, X residual streams, D model width, H heads, C entry width,
Q query rank, G output groups, R output rank, J index heads, I index width.

symbol          meaning                                                               name here            equation
X_t             residual streams of a position and the vector that reads them         Residual             mHC
p_t             position inside the document, from 0                                  t                    (8), (12)
h^(s)_t         mixed streams that enter the attention of layer l_s, or leave it      Reading.mixed_TD     (7)
u^(s)_t         input of a stage's query: h, or h beside r^(s-1)                      stage_input_D        (7)
q^(s)_t         query of a stage; q_{t,D}^(l) of a decoder layer                      read_history: query  (8), (15)
W^(s)_t         local window: the last W entries of a layer                           window_TC            (9)
B^(s)           history bank: one entry per finished group of m tokens                Bank.entry_FC        (9)
I^(s)_t         the Top-K slots of the bank                                           Bank.chosen_T        (9)
Attn            one latent as key and value, sink in the denominator                  attend               (9), (16)
Output          grouped low-rank output projection, after the inverse rotation        read_history         (9), (16)
Delta r^(s)_t   increment of a stage                                                  increment_D          (9)
r^(s)_t         accumulated retrieval output                                          retrieved_TD         (10)
e_t             mixture of the encoder's final streams                                read_out(residual)   (11)
z_t             written at a position, e + r^(S); the decoder starts from it          written_TD           (11)
m_t             shared state entry, KV_sh(z_t, p_t); J a position with multi_slot     state_EC             (12)
M_t             the last M state entries                                              state_block: entries (13)
d^(l-1)_t       mixed streams that enter the attention of decoder layer l             mixed_D              (15)
a^(l)_{t,D}     attention output of a decoder layer                                   update_TD            (16)
l_j, kI_j       latent of a bank entry before rotation; its index key                 latent_C, key_I      CSA2
qI, wI, I_{t,j} index query, index weights, index score                               index_scores         CSA2
pool            blocks of bank entries that a Reindex layer may choose from           Bank.pool_T          CSA2
A, C, M         read, write and mixing coefficients of a site                         coefficients         mHC
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Weights = dict[str, Tensor]
Notes = dict[str, list]


@dataclass
class Residual:
    """The streams of one position and the vector the next site reads them with."""

    streams_XD: list[Tensor]
    read_X: Tensor


@dataclass
class Bank:
    """The bank of a Full layer; a Reindex layer replaces `chosen_T`. Slots count from the document's start."""

    ratio: int
    entry_FC: list[Tensor]
    index_key_FI: list[Tensor]
    chosen_T: list[list[int]]
    pool_T: list[list[int]] | None = None


@dataclass
class Reading:
    """The tensors that an aggregation stage takes from its encoder layer."""

    mixed_TD: list[Tensor]
    window_TC: list[Tensor]
    bank: Bank | None
    base: float


def transcribe(
    geometry: Geometry,
    weights: Weights,
    tokens: list[int],
    documents: list[int] | None = None,
    notes: Notes | None = None,
) -> Tensor:
    """Logits float64 [T, V] of one sequence. Every run of equal `documents` is computed alone; -1 gives rows of NaN.

    `notes`, if given, is filled with lists of one item per position (bank and index_keys: one per entry) under the
    names encoder/3/{mixed, window, bank, index_keys, scores, top_k, weights, update, attention_mixing,
    feed_forward_mixing}, likewise decoder/5/... and its pool, stage/2/{input, weights, increment, retrieved},
    state/{written, entries} and hidden. Layers count over the whole depth, slots from the start of the document;
    weights are [H, window + chosen], without the share of the sink.
    """
    documents = [0] * len(tokens) if documents is None else documents
    rows = []
    start = 0
    for stop in range(1, len(tokens) + 1):
        if stop < len(tokens) and documents[stop] == documents[start]:
            continue
        page: Notes = {}
        if documents[start] == -1:
            rows += [torch.full((geometry.vocabulary,), math.nan, dtype=torch.float64)] * (stop - start)
        else:
            rows += one_document(geometry, weights, tokens[start:stop], page)
        for name, values in page.items():
            if notes is not None:
                notes.setdefault(name, []).extend(values)
        start = stop
    return torch.stack(rows)


def one_document(geometry: Geometry, weights: Weights, tokens: list[int], notes: Notes) -> list[Tensor]:
    """Logits per position. The baseline is one stack of history blocks; GSM's decoder sees the shared state alone."""
    scale = geometry.embedding_scale if geometry.embedding_scale is not None else math.sqrt(geometry.dim)
    residual_T = [copied(geometry, scale * weights["embedding.weight"][token]) for token in tokens]
    retrieved_TD = [torch.zeros(geometry.dim, dtype=torch.float64) for _ in tokens]
    bank, stage = None, 0
    for depth in range(1, geometry.encoder_layers + 1):
        residual_T, reading = history_block(geometry, weights, depth, residual_T, bank, notes)
        bank = reading.bank
        if geometry.model == "gsm" and depth in geometry.stage_layers:
            stage += 1
            retrieved_TD = aggregate(geometry, weights, stage, reading, retrieved_TD, notes)
    if geometry.model == "gsm":
        written_TD = [
            read_out(residual) + retrieved_D for residual, retrieved_D in zip(residual_T, retrieved_TD, strict=True)
        ]
        state = write_state(geometry, part(weights, "writer"), written_TD, notes)
        if geometry.decoder_start == "state":
            residual_T = [copied(geometry, written_D) for written_D in written_TD]
    for depth in range(geometry.encoder_layers + 1, geometry.depth + 1):
        if geometry.model == "gsm":
            residual_T = state_block(geometry, weights, depth, residual_T, state, notes)
        else:
            residual_T, reading = history_block(geometry, weights, depth, residual_T, bank, notes)
            bank = reading.bank
    hidden_TD = [rms_norm(read_out(residual), weights["norm.weight"], geometry.norm_eps) for residual in residual_T]
    notes["hidden"] = hidden_TD
    return [weights["embedding.weight"] @ hidden_D for hidden_D in hidden_TD]


# ---- layers


def history_block(
    geometry: Geometry, weights: Weights, depth: int, residual_T: list[Residual], bank: Bank | None, notes: Notes
):
    """A layer with its own window and, from the first Full layer on, a bank: all layers except GSM's decoder."""
    label, block = geometry.label(depth), part(weights, geometry.prefix(depth))
    attention = part(block, "attention")
    mixed_TD = [enter(geometry, part(block, "attention_residual"), residual) for residual in residual_T]
    normed_TD = [rms_norm(mixed_D, block["attention_norm.weight"], geometry.norm_eps) for mixed_D in mixed_TD]
    has_bank = bank is not None or depth in geometry.full_layers
    base = geometry.bank_base if has_bank else geometry.plain_base
    window_TC = []
    for t, x_D in enumerate(normed_TD):
        latent_C = rms_norm(
            attention["window.projection.weight"] @ x_D, attention["window.norm.weight"], geometry.norm_eps
        )
        window_TC.append(rotate(latent_C, t, geometry.rotary_dim, base))
    latent_TQ = [query_latent(geometry, attention, x_D) for x_D in normed_TD]
    if depth in geometry.full_layers:
        bank = new_bank(geometry, attention, depth, normed_TD, base)
        notes[f"{label}/bank"], notes[f"{label}/index_keys"] = bank.entry_FC, bank.index_key_FI
    if depth in geometry.full_layers or depth in geometry.decoder_reindex:
        bank = choose(geometry, part(attention, "indexer"), depth, bank, normed_TD, latent_TQ, base, notes)
    update_TD = []
    for t, latent_Q in enumerate(latent_TQ):
        chosen = bank.chosen_T[t] if has_bank else []
        entries = window_TC[max(0, t - geometry.window + 1) : t + 1] + [bank.entry_FC[slot] for slot in chosen]
        update_TD.append(read_history(geometry, attention, latent_Q, t, base, entries, notes, label))
        note(notes, f"{label}/top_k", chosen)
    notes[f"{label}/mixed"], notes[f"{label}/window"] = mixed_TD, window_TC
    finished_T = finish_block(geometry, block, residual_T, update_TD, notes, label)
    if geometry.stage_input == "after_layer":
        mixed_TD = [read_out(residual) for residual in finished_T]
    return finished_T, Reading(mixed_TD, window_TC, bank, base)


def state_block(
    geometry: Geometry,
    weights: Weights,
    depth: int,
    residual_T: list[Residual],
    state: dict[str, list[Tensor]],
    notes: Notes,
):
    """A layer of GSM's decoder (15)-(16): a query of its own on the last M entries of the shared state; with other
    readers than the paper's, on those of its group, on keys and values, or on its own last entries as well."""
    label, block = geometry.label(depth), part(weights, geometry.prefix(depth))
    attention = part(block, "attention")
    update_TD, window_TC = [], []
    for t, residual in enumerate(residual_T):
        mixed_D = enter(geometry, part(block, "attention_residual"), residual)
        x_D = rms_norm(mixed_D, block["attention_norm.weight"], geometry.norm_eps)
        stop = (t + 1) * geometry.slots
        seen = {name: state_EC[max(0, stop - geometry.state_size) : stop] for name, state_EC in state.items()}
        latent_Q = query_latent(geometry, attention, x_D)
        values = None
        if geometry.reader == "separate_kv":
            entries, values = seen["key"], seen["value"]
        elif geometry.reader == "per_group":
            below = depth - geometry.encoder_layers - 1  # decoder layers below this one
            entries = seen[f"group{1 + below * geometry.groups // geometry.decoder_layers}"]
        else:
            entries = seen["entries"]
        if geometry.reader == "state_and_window":
            latent_C = attention["window.projection.weight"] @ x_D
            latent_C = rms_norm(latent_C, attention["window.norm.weight"], geometry.norm_eps)
            window_TC.append(rotate(latent_C, t, geometry.rotary_dim, geometry.plain_base))
            entries = entries + window_TC[-geometry.reader_window :]
        update_TD.append(
            read_history(geometry, attention, latent_Q, t, geometry.plain_base, entries, notes, label, values)
        )
        note(notes, f"{label}/mixed", mixed_D)
    return finish_block(geometry, block, residual_T, update_TD, notes, label)


def finish_block(
    geometry: Geometry, block: Weights, residual_T: list[Residual], update_TD: list[Tensor], notes: Notes, label: str
):
    """The attention's update is written to the streams, then the feed-forward site reads, computes and writes."""
    notes[f"{label}/update"] = update_TD
    finished_T = []
    for residual, update_D in zip(residual_T, update_TD, strict=True):
        site = part(block, "attention_residual")
        residual = leave(geometry, site, residual, update_D, notes, f"{label}/attention_mixing")
        site = part(block, "feed_forward_residual")
        x_D = rms_norm(enter(geometry, site, residual), block["feed_forward_norm.weight"], geometry.norm_eps)
        update_D = feed_forward(part(block, "feed_forward"), x_D, geometry.clamp)
        finished_T.append(leave(geometry, site, residual, update_D, notes, f"{label}/feed_forward_mixing"))
    return finished_T


def feed_forward(weights: Weights, x_D: Tensor, clamp: float) -> Tensor:
    """SwiGLU; the gate is limited from above only, the other factor on both sides."""
    gate_F = (weights["gate.weight"] @ x_D).clamp(max=clamp)
    up_F = (weights["up.weight"] @ x_D).clamp(-clamp, clamp)
    return weights["down.weight"] @ (gate_F * torch.sigmoid(gate_F) * up_F)


# ---- aggregation and shared state (7)-(13)


def aggregate(
    geometry: Geometry, weights: Weights, stage: int, reading: Reading, retrieved_TD: list[Tensor], notes: Notes
) -> list[Tensor]:
    """One stage, (7)-(10): a new query on its encoder layer's window, bank and Top-K; returns r after this stage."""
    own, label = part(weights, f"aggregation.stages.{stage - 1}"), f"stage/{stage}"
    accumulated_TD = []
    for t, (mixed_D, retrieved_D) in enumerate(zip(reading.mixed_TD, retrieved_TD, strict=True)):
        stage_input_D = mixed_D if stage == 1 else torch.cat([mixed_D, retrieved_D])
        latent_Q = query_latent(geometry, own, rms_norm(stage_input_D, own["norm.weight"], geometry.norm_eps))
        entries = reading.window_TC[max(0, t - geometry.window + 1) : t + 1]
        entries = entries + [reading.bank.entry_FC[slot] for slot in reading.bank.chosen_T[t]]
        increment_D = read_history(geometry, own, latent_Q, t, reading.base, entries, notes, label)
        accumulated_TD.append(retrieved_D + increment_D)
        note(notes, f"{label}/input", stage_input_D)
        note(notes, f"{label}/increment", increment_D)
    notes[f"{label}/retrieved"] = accumulated_TD
    return accumulated_TD


def write_state(
    geometry: Geometry, weights: Weights, written_TD: list[Tensor], notes: Notes
) -> dict[str, list[Tensor]]:
    """One entry per position, (12): input norm, projection, norm of the entry, rotation by the decoder's table. Several
    of them, each with a projection and a norm of its own, for multi_slot, and for every part that a reader asks for."""
    x_TD = [rms_norm(written_D, weights["norm.weight"], geometry.norm_eps) for written_D in written_TD]
    notes["state/written"], state = written_TD, {}
    for name in geometry.state_parts:
        latent_TJC = []
        for x_D in x_TD:
            latent_TJC.append([])
            for place in [f"entry.{name}", *(f"further.{name}.{slot}" for slot in range(geometry.slots - 1))]:
                entry_C = weights[f"{place}.projection.weight"] @ x_D
                latent_TJC[-1].append(rms_norm(entry_C, weights[f"{place}.norm.weight"], geometry.norm_eps))
        channels = 0 if name == "value" else geometry.rotary_dim
        if geometry.writer == "delta":
            latent_TC = [latent_C for (latent_C,) in latent_TJC]
            latent_TJC = correct(geometry, part(weights, f"correction.{name}"), x_TD, latent_TC, channels)
        state[name] = notes[f"state/{name}"] = [
            rotate(latent_C, t, channels, geometry.plain_base)
            for t, latent_JC in enumerate(latent_TJC)
            for latent_C in latent_JC
        ]
    return state


def correct(
    geometry: Geometry, weights: Weights, x_TD: list[Tensor], plain_TC: list[Tensor], channels: int
) -> list[list[Tensor]]:
    """Return the entries of the writer delta before rotation. Each is reduced by a part of the output of one attention
    head, with its own query, on the M - 1 uncorrected entries before it."""
    base, corrected_TJC = geometry.plain_base, []
    for t, (x_D, plain_C) in enumerate(zip(x_TD, plain_TC, strict=True)):
        before = range(max(0, t - geometry.state_size + 1), t)
        entries = [rotate(plain_TC[i], i, channels, base) for i in before]
        query_C = rotate(weights["query.weight"] @ x_D, t, channels, base)
        predicted_C = rotate(attend(query_C, entries, weights["sink"][0])[0], t, channels, base, inverse=True)
        beta = 1 / (1 + torch.exp(-(weights["rate.weight"][0] @ x_D + weights["bias"][0])))
        rest_C = plain_C - beta * predicted_C
        corrected_TJC.append([rms_norm(rest_C, weights["norm.weight"], geometry.norm_eps)])
    return corrected_TJC


# ---- attention


def query_latent(geometry: Geometry, weights: Weights, x_D: Tensor) -> Tensor:
    """The normed low-rank query, from which both the heads' queries and the index queries are made."""
    return rms_norm(weights["query.down.weight"] @ x_D, weights["query.norm.weight"], geometry.norm_eps)


def read_history(
    geometry: Geometry,
    weights: Weights,
    latent_Q: Tensor,
    t: int,
    base: float,
    entries: list[Tensor],
    notes: Notes,
    label: str,
    values: list[Tensor] | None = None,
) -> Tensor:
    """Query, rotation, attention, inverse rotation, grouped output, as every layer and stage does it; returns [D]. With
    ``values``, entries are keys alone, and nothing is rotated back."""
    width, heads_per_group = geometry.entry_dim, geometry.heads // geometry.output_groups
    query_C = weights["query.up.weight"] @ latent_Q
    head_HC, shares_H = [], []
    for head in range(geometry.heads):
        query = rotate(query_C[head * width : (head + 1) * width], t, geometry.rotary_dim, base)
        value_C, shares = attend(query, entries, weights["sink"][head])
        value_C = rotate(value_C, t, geometry.rotary_dim, base, inverse=True)
        if values is not None:
            value_C = sum(share * value for share, value in zip(shares, values, strict=True))
        head_HC.append(value_C)
        shares_H.append(shares)
    low_GR = []
    for group in range(geometry.output_groups):
        members = torch.cat(head_HC[group * heads_per_group : (group + 1) * heads_per_group])
        low_GR.append(weights["output.down.weight"][group] @ members)
    note(notes, f"{label}/weights", torch.tensor(shares_H, dtype=torch.float64))
    return weights["output.up.weight"] @ torch.cat(low_GR)


def attend(query_C: Tensor, entries: list[Tensor], sink: Tensor) -> tuple[Tensor, list[float]]:
    """One head: every entry is key and value, the sink takes a share and gives nothing. Returns output and shares."""
    logits = [query_C @ entry_C / math.sqrt(len(query_C)) for entry_C in entries]
    largest = max([float(sink.detach())] + [float(logit.detach()) for logit in logits])
    value_C = torch.zeros_like(query_C)
    if not entries:
        return value_C, []
    total = torch.exp(sink - largest)
    for logit in logits:
        total = total + torch.exp(logit - largest)
    shares = [torch.exp(logit - largest) / total for logit in logits]
    for share, entry_C in zip(shares, entries, strict=True):
        value_C = value_C + share * entry_C
    return value_C, [float(share.detach()) for share in shares]


def rotate(x_C: Tensor, position: int, channels: int, base: float, inverse: bool = False) -> Tensor:
    """Turn pair i (channels 2i, 2i + 1) of the last `channels` channels by position * base^(-2i / channels)."""
    first = len(x_C) - channels
    turned = list(x_C)
    for pair in range(channels // 2):
        angle = position * base ** (-2 * pair / channels)
        if inverse:
            angle = -angle
        even, odd = first + 2 * pair, first + 2 * pair + 1
        turned[even] = x_C[even] * math.cos(angle) - x_C[odd] * math.sin(angle)
        turned[odd] = x_C[even] * math.sin(angle) + x_C[odd] * math.cos(angle)
    return torch.stack(turned)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


# ---- bank and index


def new_bank(geometry: Geometry, weights: Weights, depth: int, normed_TD: list[Tensor], base: float) -> Bank:
    """One latent per finished group of m tokens, rotated to its first token; its index key is made before that."""
    ratio, channels = geometry.ratio(depth), geometry.rotary_dim
    entry_FC, index_key_FI = [], []
    for slot in range(len(normed_TD) // ratio):
        members = normed_TD[slot * ratio : (slot + 1) * ratio]
        values = [weights["compressor.value.weight"] @ x_D for x_D in members]
        pooled_C = values[0]
        if ratio > 1:
            powers = [torch.exp(weights["compressor.gate.weight"] @ x_D) for x_D in members]
            pooled_C = sum(power * value for power, value in zip(powers, values, strict=True)) / sum(powers)
        latent_C = rms_norm(pooled_C, weights["compressor.norm.weight"], geometry.norm_eps)
        entry_FC.append(rotate(latent_C, slot * ratio, channels, base))
        key_I = rms_norm(
            weights["indexer.key.weight"] @ latent_C, weights["indexer.key_norm.weight"], geometry.norm_eps
        )
        index_key_FI.append(rotate(key_I, slot * ratio, channels, base))
    return Bank(ratio, entry_FC, index_key_FI, chosen_T=[])


def choose(
    geometry: Geometry,
    weights: Weights,
    depth: int,
    bank: Bank,
    normed_TD: list[Tensor],
    latent_TQ: list[Tensor],
    base: float,
    notes: Notes,
) -> Bank:
    """The bank with this layer's own Top-K: the best visible slots, ties to the lowest, in ascending order."""
    chosen_T, pool_T = [], []
    for t, (x_D, latent_Q) in enumerate(zip(normed_TD, latent_TQ, strict=True)):
        visible = list(range((t + 1) // bank.ratio))
        scores = index_scores(geometry, weights, x_D, latent_Q, t, base, [bank.index_key_FI[slot] for slot in visible])
        if depth == geometry.decoder_full:
            pool_T.append(best_blocks(geometry, scores))
        elif bank.pool_T is not None:
            visible = [slot for slot in visible if slot // geometry.pool_block in bank.pool_T[t]]
        chosen_T.append(sorted(sorted(visible, key=lambda slot: (-scores[slot], slot))[: geometry.top_k]))
        note(notes, f"{geometry.label(depth)}/scores", scores)
    if depth == geometry.decoder_full and geometry.pool_blocks is not None:
        bank = replace(bank, pool_T=pool_T)
        notes[f"{geometry.label(depth)}/pool"] = pool_T
    return replace(bank, chosen_T=chosen_T)


def index_scores(
    geometry: Geometry, weights: Weights, x_D: Tensor, latent_Q: Tensor, t: int, base: float, keys: list[Tensor]
) -> list[float]:
    """score_j = sum over index heads of weight * relu(query . key_j), the weights scaled by I^-1/2 and J^-1/2."""
    x_D, latent_Q, keys = (
        x_D.detach(),
        latent_Q.detach(),
        [key_I.detach() for key_I in keys],
    )  # a choice has no gradient
    width = geometry.index_dim
    queries = weights["query.weight"].detach() @ latent_Q
    weight_J = weights["weight.weight"].detach() @ x_D / math.sqrt(width) / math.sqrt(geometry.index_heads)
    scores = [0.0] * len(keys)
    for head in range(geometry.index_heads):
        query_I = rotate(queries[head * width : (head + 1) * width], t, geometry.rotary_dim, base)
        for slot, key_I in enumerate(keys):
            scores[slot] += float(weight_J[head]) * max(0.0, float(query_I @ key_I))
    return scores


def best_blocks(geometry: Geometry, scores: list[float]) -> list[int]:
    """Blocks of consecutive slots with the best single score; the block of the newest slot is always among them."""
    blocks: dict[int, float] = {}
    for slot, score in enumerate(scores):
        block = slot // geometry.pool_block
        blocks[block] = max(score, blocks.get(block, -math.inf))
    if blocks:
        blocks[(len(scores) - 1) // geometry.pool_block] = math.inf
    return sorted(sorted(blocks, key=lambda block: (-blocks[block], block))[: geometry.pool_blocks])


# ---- residual streams (mHC)


def copied(geometry: Geometry, x_D: Tensor) -> Residual:
    """The start of a stack: every stream a copy, the first site reads stream 0."""
    streams = 1 if geometry.residual == "plain" else geometry.streams
    first_X = torch.zeros(streams, dtype=torch.float64)
    first_X[0] = 1.0
    return Residual([x_D] * streams, first_X)


def enter(geometry: Geometry, weights: Weights, residual: Residual) -> Tensor:
    """Return a site's input: the streams, mixed by the previous site's read vector (single-pass), or by a read vector
    that these streams and the site's own weights determine (as in Xie et al.)."""
    if geometry.residual == "mhc_two_pass":
        residual = Residual(residual.streams_XD, coefficients(geometry, weights, residual.streams_XD)[0])
    return read_out(residual)


def read_out(residual: Residual) -> Tensor:
    """Return the output of a layer or a stack: the streams, mixed by their read vector."""
    return sum(read * stream_D for read, stream_D in zip(residual.read_X, residual.streams_XD, strict=True))


def leave(
    geometry: Geometry, weights: Weights, residual: Residual, update_D: Tensor, notes: Notes, name: str
) -> Residual:
    """Stream k becomes C_k update + sum_j M[j, k] stream_j, A goes to the next site. Plain: one stream, a sum."""
    if geometry.residual == "plain":
        return Residual([residual.streams_XD[0] + update_D], residual.read_X)
    read_X, write_X, mixing_XX = coefficients(geometry, weights, residual.streams_XD)
    if geometry.residual == "mhc_two_pass":  # nothing is handed over; who has no site takes the mean
        read_X = torch.full_like(read_X, 1 / geometry.streams)
    note(notes, name, mixing_XX)
    streams_XD = []
    for destination in range(geometry.streams):
        stream_D = write_X[destination] * update_D
        for source in range(geometry.streams):
            stream_D = stream_D + mixing_XX[source, destination] * residual.streams_XD[source]
        streams_XD.append(stream_D)
    return Residual(streams_XD, read_X)


def coefficients(geometry: Geometry, weights: Weights, streams_XD: list[Tensor]):
    """A, C and M from the streams that entered the site, normed over all of their channels together."""
    n, eps = geometry.streams, geometry.hc_eps
    flat = torch.cat(streams_XD)
    raw = weights["phi"] @ (flat / torch.sqrt((flat * flat).mean() + geometry.norm_eps))
    scale, bias = weights["scale"], weights["bias"]
    read_X = torch.sigmoid(scale[0] * raw[:n] + bias[:n]) + eps
    write_X = 2 * torch.sigmoid(scale[1] * raw[n : 2 * n] + bias[n : 2 * n])
    rows = [slice(2 * n + source * n, 2 * n + (source + 1) * n) for source in range(n)]
    mixing_XX = torch.stack([torch.softmax(scale[2] * raw[row] + bias[row], dim=0) + eps for row in rows])
    for iteration in range(geometry.sinkhorn_rounds):
        if iteration > 0:
            mixing_XX = mixing_XX / (mixing_XX.sum(dim=1, keepdim=True) + eps)
        mixing_XX = mixing_XX / (mixing_XX.sum(dim=0, keepdim=True) + eps)
    return read_X, write_X, mixing_XX


# ---- small things


def part(weights: Weights, prefix: str) -> Weights:
    """The weights below a prefix, by their names from there on."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in weights.items() if name.startswith(prefix + ".")}


def note(notes: Notes, name: str, value) -> None:
    notes.setdefault(name, []).append(value)


# ---- geometry and weights


@dataclass(frozen=True)
class Geometry:
    """Every number of a model; layers count from 1 over the whole depth. The defaults are the tests' tiny GSM."""

    model: str = "gsm"  # or "baseline"
    residual: str = "mhc"  # or "mhc_two_pass", "plain"
    stage_input: str = "before_layer"  # or "after_layer"
    decoder_start: str = "state"  # or "streams"
    writer: str = "additive"  # or "multi_slot", "delta"
    slots: int = 1  # entries of a position, for multi_slot
    reader: str = "shared"  # or "separate_kv", "per_group", "state_and_window"
    groups: int = 2  # for per_group
    reader_window: int = 3  # for state_and_window
    vocabulary: int = 23
    dim: int = 16
    encoder_layers: int = 4
    decoder_layers: int = 4
    heads: int = 4
    entry_dim: int = 8
    rotary_dim: int = 4
    query_rank: int = 12
    output_groups: int = 2
    output_rank: int = 5
    index_heads: int = 2
    index_dim: int = 6
    window: int = 4
    top_k: int = 3
    state_size: int = 7
    ratio_encoder: int = 2
    ratio_decoder: int = 1
    bank_layers: tuple[int, ...] = (2, 3)
    stage_layers: tuple[int, ...] = (2, 4)
    decoder_full: int | None = None
    decoder_reindex: tuple[int, ...] = ()
    pool_blocks: int | None = None
    pool_block: int = 8
    streams: int = 3
    sinkhorn_rounds: int = 3  # the paper has 20, which would take most of the time; one test has them too
    ffn_dim: int = 20
    clamp: float = 10.0
    bank_base: float = 160000.0
    plain_base: float = 10000.0
    norm_eps: float = 1e-6
    hc_eps: float = 1e-6
    embedding_scale: float | None = None  # None: sqrt(dim)

    def __post_init__(self) -> None:
        if self.decoder_full not in (None, self.encoder_layers + 1):
            raise ValueError(
                f"decoder_full is {self.decoder_full}: only layer {self.encoder_layers + 1} reads the encoder's output"
            )
        if self.rotary_dim > min(self.entry_dim, self.index_dim):
            raise ValueError(
                f"rotary_dim is {self.rotary_dim}: it must fit in {self.entry_dim} and {self.index_dim} (index_dim)"
            )

    @property
    def depth(self) -> int:
        return self.encoder_layers + self.decoder_layers

    @property
    def full_layers(self) -> tuple[int, ...]:
        return self.bank_layers if self.decoder_full is None else (*self.bank_layers, self.decoder_full)

    @property
    def state_parts(self) -> list[str]:
        groups = [f"group{group}" for group in range(1, self.groups + 1)]
        return {"separate_kv": ["key", "value"], "per_group": groups}.get(self.reader, ["entries"])

    def ratio(self, depth: int) -> int:
        return self.ratio_encoder if depth <= self.encoder_layers else self.ratio_decoder

    def label(self, depth: int) -> str:
        return f"encoder/{depth}" if depth <= self.encoder_layers else f"decoder/{depth}"

    def prefix(self, depth: int) -> str:
        inside = depth - 1 if depth <= self.encoder_layers else depth - 1 - self.encoder_layers
        return f"{'encoder' if depth <= self.encoder_layers else 'decoder'}.blocks.{inside}"


def tiny_gsm(**changes) -> Geometry:
    return Geometry(**changes)


def tiny_baseline(**changes) -> Geometry:
    return Geometry(**{"model": "baseline", "stage_layers": (), "decoder_full": 5, "decoder_reindex": (7,)} | changes)


def random_weights(geometry: Geometry, seed: int = 0) -> Weights:
    """A float64 tensor per name, far from any initial value, so that clamps bind and no sink or gate hides."""
    generator = torch.Generator().manual_seed(seed)
    gains = {
        "feed_forward.gate.weight": 8.0,
        "feed_forward.up.weight": 8.0,
        "feed_forward.down.weight": 0.05,
        "query.up.weight": 2.0,
    }
    weights = {}
    for name, shape in parameter_shapes(geometry).items():
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            weights[name] = 0.5 + torch.sigmoid(normal)
        elif name.endswith((".scale", ".sink")):
            weights[name] = torch.where(normal < 0, -1.0, 1.0).double() * (0.5 + torch.sigmoid(normal))
        elif name.endswith(".bias"):
            weights[name] = normal
        else:
            gain = next((gain for ending, gain in gains.items() if name.endswith(ending)), 1.0)
            weights[name] = gain * normal / math.sqrt(shape[-1])
    return weights


def parameter_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter."""
    dim, width = geometry.dim, geometry.entry_dim
    shapes = {"embedding.weight": (geometry.vocabulary, dim), "norm.weight": (dim,)}
    for depth in range(1, geometry.depth + 1):
        shapes |= {f"{geometry.prefix(depth)}.{name}": shape for name, shape in block_shapes(geometry, depth).items()}
    if geometry.model != "gsm":
        return shapes
    for stage in range(len(geometry.stage_layers)):
        input_dim = dim if stage == 0 else 2 * dim
        own = {"norm.weight": (input_dim,)} | reading_shapes(geometry, input_dim)
        shapes |= {f"aggregation.stages.{stage}.{name}": shape for name, shape in own.items()}
    writer = {"norm.weight": (dim,)}
    for name in geometry.state_parts:
        for place in [f"entry.{name}", *(f"further.{name}.{slot}" for slot in range(geometry.slots - 1))]:
            writer |= {f"{place}.projection.weight": (width, dim), f"{place}.norm.weight": (width,)}
        if geometry.writer == "delta":
            own = {"query.weight": (width, dim), "sink": (1,), "rate.weight": (1, dim), "bias": (1,)}
            own["norm.weight"] = (width,)
            writer |= {f"correction.{name}.{weight}": shape for weight, shape in own.items()}
    return shapes | {f"writer.{name}": shape for name, shape in writer.items()}


def block_shapes(geometry: Geometry, depth: int) -> dict[str, tuple[int, ...]]:
    dim, ffn, n = geometry.dim, geometry.ffn_dim, geometry.streams
    shapes = {f"attention.{name}": shape for name, shape in attention_shapes(geometry, depth).items()}
    shapes |= {"attention_norm.weight": (dim,), "feed_forward_norm.weight": (dim,)}
    shapes |= {
        "feed_forward.gate.weight": (ffn, dim),
        "feed_forward.up.weight": (ffn, dim),
        "feed_forward.down.weight": (dim, ffn),
    }
    if geometry.residual != "plain":
        for site in ("attention_residual", "feed_forward_residual"):
            shapes |= {f"{site}.phi": (2 * n + n * n, n * dim), f"{site}.bias": (2 * n + n * n,), f"{site}.scale": (3,)}
    return shapes


def attention_shapes(geometry: Geometry, depth: int) -> dict[str, tuple[int, ...]]:
    dim, width, index = geometry.dim, geometry.entry_dim, geometry.index_dim
    shapes = reading_shapes(geometry, dim)
    if geometry.model == "baseline" or depth <= geometry.encoder_layers or geometry.reader == "state_and_window":
        shapes |= {"window.projection.weight": (width, dim), "window.norm.weight": (width,)}
    if depth in geometry.full_layers:
        shapes |= {"compressor.value.weight": (width, dim), "compressor.norm.weight": (width,)}
        shapes |= {"indexer.key.weight": (index, width), "indexer.key_norm.weight": (index,)}
        if geometry.ratio(depth) > 1:
            shapes["compressor.gate.weight"] = (width, dim)
    if depth in geometry.full_layers or depth in geometry.decoder_reindex:
        shapes["indexer.query.weight"] = (geometry.index_heads * index, geometry.query_rank)
        shapes["indexer.weight.weight"] = (geometry.index_heads, dim)
    return shapes


def reading_shapes(geometry: Geometry, input_dim: int) -> dict[str, tuple[int, ...]]:
    """Return the parameters of every reader of a history: query, sink, output."""
    channels = geometry.heads * geometry.entry_dim
    groups, rank = geometry.output_groups, geometry.output_rank
    return {
        "query.down.weight": (geometry.query_rank, input_dim),
        "query.norm.weight": (geometry.query_rank,),
        "query.up.weight": (channels, geometry.query_rank),
        "sink": (geometry.heads,),
        "output.down.weight": (groups, rank, channels // groups),
        "output.up.weight": (geometry.dim, groups * rank),
    }
