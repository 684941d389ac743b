"""What the Talker is trained on: every utterance laid out twice, kept on the training device, packed into rows of POSITIONS.

Text streamed one token a frame (with LEAD_FRAMES of leading silence as look-ahead), and whole text first."""

import argparse
import time

import numpy as np
import torch
from torch import Tensor

from . import parts, tokenizer
from .codec_model import Codec
from .data import new_shards
from .sizes import FRAME, FRAMES_AN_HOUR, LEAD_FRAMES, LEAD_WHOLE, TALKER, TTS_PAD
from .talker_model import prompt

POSITIONS = 512  # of a packed row
NONE, END = -1, -2  # labels: nothing to predict here; end of speech
AUTO_SHARE = 3  # every third utterance has the prompt of language "auto"
GROUPS = TALKER.groups


def lay_out(ids: list[int], spoken: np.ndarray, streaming: bool, english: bool, first_frame: int) -> tuple[np.ndarray, ...]:
    """One utterance as aligned arrays over positions.

    spoken [n]: for every frame, the text token being spoken (a float). -> text ids, codec ids, frame fed, frame to predict
    (or NONE, END), index of the text token held (guided attention's keys), text token to look at.
    """
    skip = 0 if streaming else LEAD_FRAMES - LEAD_WHOLE
    spoken, first_frame = spoken[skip:], first_frame + skip
    n = len(spoken)
    text_rows, codec_rows, rest = prompt(ids, streaming, english)
    p = len(text_rows)
    text, codec = np.full(p + n, TTS_PAD, np.int16), np.full(p + n, -1, np.int16)
    fed, label = np.full(p + n, NONE, np.int32), np.full(p + n, NONE, np.int32)
    token, target = np.full(p + n, -1, np.int16), np.zeros(p + n, np.float32)
    text[:p], codec[:p] = text_rows, codec_rows
    k = min(len(rest), n)
    text[p : p + k] = rest[:k]
    fed[p:] = np.arange(first_frame, first_frame + n)
    label[p - 1 : p - 1 + n] = np.arange(first_frame, first_frame + n)
    label[p - 1 + n] = END
    if streaming:
        token[p - 1 : p + k] = np.arange(k + 1)
    else:
        token[p - 2 - len(ids) : p - 1] = np.arange(len(ids) + 1)
    target[p - 1 : p - 1 + n] = spoken
    target[p - 1 + n] = len(ids)
    return text, codec, fed, label, token, target


def spoken_tokens(offsets: list[tuple[int, int]], chars: np.ndarray, length: int) -> np.ndarray:
    """Character being spoken in each frame -> token being spoken; 0 is the middle of token 0, len(offsets) is after the text."""
    starts, ends = np.asarray(offsets, np.float32).T
    j = np.clip(np.searchsorted(starts, chars, side="right") - 1, 0, len(starts) - 1)
    at = j + np.clip((chars - starts[j]) / np.maximum(1, ends[j] - starts[j]), 0, 0.99) - 0.4
    return np.where(chars >= length - 0.01, len(starts), at).astype(np.float32)


class Corpus:
    """Codes and layouts of everything seen so far, on the training device. A thread prepares shards, `take` moves them in."""

    def __init__(self, args: argparse.Namespace, device: str, cuda: bool) -> None:
        self.args, self.device, self.cuda = args, device, cuda
        self.tokenizer = tokenizer.load(args.tokenizer)
        self.rows = parts.read_rows(args.text)
        self.frames_max = int(args.hours * FRAMES_AN_HOUR) if cuda else 200_000
        self.places_max = int(self.frames_max * 3.6)

        def zeros(n, dtype, *shape):
            return torch.zeros(n, *shape, dtype=dtype, device=device)

        self.codes, self.phones = zeros(self.frames_max + 4, torch.uint8, GROUPS), zeros(self.frames_max + 4, torch.uint8, 4)
        self.utterance = zeros(self.frames_max + 4, torch.int32)
        kinds = (torch.int16, torch.int16, torch.int32, torch.int32, torch.int16, torch.float32)
        self.layout = [zeros(self.places_max, k) for k in kinds]  # text, codec, fed, label, token, target
        self.frames = self.places = self.utterances = 0
        self.items: list[tuple[int, int]] = []  # (place, length) of each laid-out utterance
        self.held_out: list[tuple[list[int], np.ndarray, int]] = []
        self.held_out_wanted = 160 if cuda else 4
        self.seen: set[str] = set()
        self.prepared: list[tuple] = []
        self.closed = False

    def prepare(self, limit: int) -> tuple | None:
        """Host part: reads shards, tokenizes, lays out with frame numbers from 0."""
        shards = new_shards(self.args.shards, self.seen, limit)
        if not shards:
            return None
        audio, phones, frames, index, chars = (np.concatenate([s[k] for s in shards]) for k in range(5))
        frames, chars = frames.astype(np.int64), chars.astype(np.float32)
        starts = np.concatenate([[0], np.cumsum(frames)])
        encoded = self.tokenizer.encode_batch([self.rows[i] for i in index], add_special_tokens=False)
        layouts, items, held_out, place = [], [], [], 0
        for u in range(len(frames)):
            ids = encoded[u].ids
            spoken = spoken_tokens(encoded[u].offsets, chars[starts[u] : starts[u + 1]], len(self.rows[index[u]]))
            if len(self.held_out) + len(held_out) < self.held_out_wanted and u % 8 == 0:
                held_out.append((ids, spoken, int(starts[u])))
                continue
            for streaming in (True, False):
                one = lay_out(ids, spoken, streaming, u % AUTO_SHARE != 0, int(starts[u]))
                if len(one[0]) <= POSITIONS:
                    layouts.append(one)
                    items.append((place, len(one[0])))
                    place += len(one[0])
            if u % 64 == 63:
                time.sleep(0.001)  # lets the training thread run
        return audio, phones, frames, starts, [np.concatenate([a[k] for a in layouts]) for k in range(6)], items, held_out

    def keep_preparing(self) -> None:
        while not self.closed:
            made = None
            if len(self.prepared) < 40:
                try:
                    made = self.prepare(40)
                except Exception as error:
                    print("preparing:", repr(error)[:300], flush=True)
            if made:
                self.prepared.append(made)
            time.sleep(0.5 if len(self.prepared) < 2 else 8)  # larger lots while nobody takes them

    @torch.no_grad()
    def take(self, codec: Codec) -> bool:
        """Device part: encodes one prepared lot and appends it. False when there is no more room."""
        audio, phones, frames, starts, layout, items, held_out = self.prepared.pop(0)
        n, places = int(starts[-1]), len(layout[0])
        if self.frames + n > self.frames_max or self.places + places + 60_000 > self.places_max:
            return False
        wave = torch.from_numpy(audio).to(self.device).view(-1, FRAME)
        order, g = np.argsort(-frames), 0
        while g < len(order):  # utterances of like length together, each from its own start
            longest = int(frames[order[g]])
            some = order[g : g + max(1, (24_000 if self.cuda else 1_000) // longest)]
            g += len(some)
            first, count = (torch.from_numpy(a[some]).to(self.device)[:, None] for a in (starts[:-1], frames))
            k = torch.arange(longest, device=self.device)
            at, real = (first + k).clamp(max=len(wave) - 1), k < count
            sound = torch.where(real[..., None], wave[at].float() / 32767, 0.0).reshape(len(some), 1, -1)
            self.codes[self.frames + at[real]] = codec.encode(sound).transpose(1, 2)[real].to(torch.uint8)
        here = slice(self.frames, self.frames + n)
        self.phones[here] = torch.from_numpy(phones).to(self.device)
        self.utterance[here] = torch.from_numpy(np.repeat(np.arange(len(frames)) + self.utterances + 1, frames).astype(np.int32)).to(self.device)
        for k in (2, 3):
            layout[k] = np.where(layout[k] >= 0, layout[k] + self.frames, layout[k]).astype(np.int32)
        for target, source in zip(self.layout, layout, strict=False):
            target[self.places : self.places + places] = torch.from_numpy(source).to(self.device)
        self.items += [(a + self.places, b) for a, b in items]
        self.held_out += [(i, t, o + self.frames) for i, t, o in held_out]
        self.places, self.frames, self.utterances = self.places + places, self.frames + n, self.utterances + len(frames)
        return True

    def pack(self, items: list[tuple[int, int]], rng: np.random.Generator | None) -> tuple[Tensor, Tensor]:
        """Next-fit into rows -> place of each position (or -1) and number of the utterance within the row, [rows, POSITIONS] each."""
        array = np.asarray(items, np.int64)
        if rng is not None:
            array = array[rng.permutation(len(array))]
        ends = np.concatenate([[0], np.cumsum(array[:, 1])])
        cuts, b = [0], 0
        while True:
            b = int(np.searchsorted(ends, ends[b] + POSITIONS, side="right")) - 1
            if b >= len(array):
                break
            cuts.append(b)
        cuts = np.asarray([*cuts, len(array)])
        row = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
        start = row * POSITIONS + ends[:-1] - ends[cuts[row]]
        place, segment = np.full((len(cuts) - 1) * POSITIONS, -1, np.int32), np.full((len(cuts) - 1) * POSITIONS, -1, np.int16)
        inner = np.arange(ends[-1]) - np.repeat(ends[:-1], array[:, 1])
        to = np.repeat(start, array[:, 1]) + inner
        place[to] = np.repeat(array[:, 0], array[:, 1]) + inner
        segment[to] = np.repeat(np.arange(len(array)) - cuts[row], array[:, 1])
        return tuple(torch.from_numpy(a).view(-1, POSITIONS).to(self.device) for a in (place, segment))

    def validation(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Held-out utterances with their own text and with another's, both layouts."""
        sets = {}
        order = sorted(range(len(self.held_out)), key=lambda i: len(self.held_out[i][1]))
        for name, streaming, shift in (
            ("streamed", True, 0),
            ("streamed, wrong text", True, 1),
            ("whole", False, 0),
            ("whole, wrong text", False, 1),
        ):
            items = []
            for a, i in enumerate(order):
                _, spoken, frame = self.held_out[i]
                one = lay_out(self.held_out[order[(a + shift) % len(order)]][0], spoken, streaming, True, frame)
                if len(one[0]) > POSITIONS:
                    continue
                for target, source in zip(self.layout, one, strict=False):
                    target[self.places : self.places + len(source)] = torch.from_numpy(source).to(self.device)
                items.append((self.places, len(one[0])))
                self.places += len(one[0])
            sets[name] = self.pack(items, None)
        return sets
