"""The drafter's training on a tiny random Llama: writing, distillation, resumption, evaluation, export."""

import json
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from minedraft_core.training.corpus import Corpus, CorpusPlan, starts, write_corpus
from minedraft_core.training.distill import DistillPlan, Step, distill, losses
from minedraft_core.training.evaluate import Prompt, Reference, acceptance_probabilities, count_rounds, evaluate, references
from minedraft_core.training.export import assemble, pack, quantise
from minedraft_core.training.model import Drafter, draft_vocabulary, spread
from minedraft_core.training.prompts import read_prompts
from minedraft_core.training.template import Template
from minedraft_core.training.writer import Start, Written, write

VOCABULARY = 64
TEMPLATE = Template(opening=(1, 3, 4), to_answer=(2, 5), to_user=(2, 6), stops=(2,))
CPU = torch.device("cpu")


class Words:
    """A tokenizer of one token a letter, with no more than the corpus asks for."""

    chat_template = "{{ messages }}"
    bos_token_id, eos_token_id = 1, 2

    def apply_chat_template(self, messages, **_):
        return "^" + "".join(f"<{m['role'][0]}>{m['content']}|" for m in messages) + "<a>"

    def __call__(self, text, **_):
        return type("Encoded", (), {"input_ids": [10 + ord(letter) % 50 for letter in text]})


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose time to threads that wait for each other
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(32)  # sharp distributions, as a trained model has
    return model


@pytest.fixture(scope="module")
def corpus(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    plan = CorpusPlan(shards=2, rows=192, length=40, top=8, temperatures=(0.0, 1.0), user_temperature=1.0, seed=5)
    write_corpus(folder, plan, target, Words(), ["abc"])
    return Corpus(folder, 2, CPU)


def plan_of(**changes):
    return DistillPlan(**{"steps": 20, "batch_rows": 8, "learning_rate": 3e-3, "hard_weight": 0.3, "user_weight": 0.2, "seed": 1} | changes)


def start_of(target, **changes):
    return Drafter.start(target, **{"layers": 2, "intermediate_size": 64, "token_ids": torch.arange(VOCABULARY), "seed": 2} | changes)


def one_conversation(target, *, answering, temperature, seed=0, length=40):
    return write(
        target,
        TEMPLATE,
        [Start((*TEMPLATE.opening, 20, 21, *(TEMPLATE.to_answer if answering else ())), answering, temperature)] * 3,
        length=length,
        top=VOCABULARY,
        user_limit=6,
        answer_limit=9,
        user_temperature=1.0,
        generator=torch.Generator().manual_seed(seed),
    )


def test_template_is_read_off_the_chat_template():
    template = Template.of(Words())
    assert template.opening == tuple(Words()("^<u>").input_ids)
    assert template.to_answer == tuple(Words()("|<a>").input_ids)
    assert template.to_user == tuple(Words()("|<u>").input_ids)
    assert template.to_answer[0] in template.stops


def test_noted_distribution_is_that_of_a_plain_pass(target):
    written = one_conversation(target, answering=False, temperature=1.0)
    expected = target(input_ids=written.tokens.long()).logits.log_softmax(-1).gather(-1, written.top_ids.long())
    assert torch.allclose(written.top_logprobs.float(), expected, atol=0.02)
    assert torch.equal(written.top_logprobs, written.top_logprobs.sort(-1, descending=True).values)


def test_greedy_answers_are_the_targets_argmax(target):
    written = one_conversation(target, answering=True, temperature=0.0)
    best = target(input_ids=written.tokens.long()).logits.argmax(-1)
    chosen = written.answer[:, 1:]
    assert chosen.any()
    assert torch.equal(best[:, :-1][chosen], written.tokens[:, 1:][chosen].long())
    assert not torch.equal(written.tokens, one_conversation(target, answering=True, temperature=1.0).tokens)


def test_turns_keep_their_limits_and_the_template_between_them(target):
    written = one_conversation(target, answering=True, temperature=1.0)
    for tokens, answer in zip(written.tokens.tolist(), written.answer.tolist(), strict=True):
        assert tokens[:7] == [1, 3, 4, 20, 21, 2, 5]
        ended = next(place for place in range(7, 40) if not answer[place])
        assert ended - 7 <= 9
        after = [2, 6] if tokens[ended - 1] != 2 else [6]
        assert tokens[ended : ended + len(after)] == after


def test_a_long_first_turn_is_held_open_and_closed_once(target):
    held = Start((*TEMPLATE.opening, 20), False, 1.0, least=12, closer=(30, 31, 32))
    short = Start((*TEMPLATE.opening, 20), False, 1.0, least=0, closer=())
    written = write(
        target,
        TEMPLATE,
        [held, short] * 8,
        length=60,
        top=4,
        user_limit=16,
        answer_limit=5,
        user_temperature=1.0,
        generator=torch.Generator().manual_seed(0),
    )
    rows = written.tokens.tolist()
    for row in rows[::2]:
        assert TEMPLATE.stops[0] not in row[4:16]
        assert row[16:19] == [30, 31, 32]
        assert sum(row[at : at + 3] == [30, 31, 32] for at in range(len(row))) == 1
    assert any(TEMPLATE.stops[0] in row[4:16] for row in rows[1::2])
    assert not written.answer[::2, :19].any()


def test_shares_of_passages_and_foreign_sentences():
    plan = CorpusPlan(shards=1, rows=400, length=900, top=8, temperatures=(0.0, 1.0), user_temperature=1.0, seed=5)
    with_both = CorpusPlan(**{**plan.__dict__, "passages": 0.5, "foreign": 0.25})
    begun = starts(with_both, 0, TEMPLATE, Words(), [])
    assert sum(start.least >= 100 for start in begun) == pytest.approx(200, abs=40)
    assert sum(0 < start.least < 60 for start in begun) == pytest.approx(100, abs=30)
    assert any(start.closer for start in begun)
    assert not any(start.least or start.closer for start in starts(plan, 0, TEMPLATE, Words(), []))


def test_writing_goes_on_where_it_was_broken_off(target, corpus, tmp_path):
    plan = CorpusPlan(shards=2, rows=192, length=40, top=8, temperatures=(0.0, 1.0), user_temperature=1.0, seed=5)
    write_corpus(tmp_path, CorpusPlan(**{**plan.__dict__, "shards": 1}), target, Words(), ["abc"])
    write_corpus(tmp_path, plan, target, Words(), ["abc"])
    again = Corpus(tmp_path, 2, CPU)
    everything = torch.arange(corpus.rows)
    assert torch.equal(again.take(everything).tokens, corpus.take(everything).tokens)
    with pytest.raises(ValueError, match="other settings"):
        write_corpus(tmp_path, CorpusPlan(**{**plan.__dict__, "seed": 6}), target, Words(), ["abc"])


def test_a_shard_that_another_run_has_begun_is_left_to_it(target, corpus, tmp_path):
    plan = CorpusPlan(shards=2, rows=192, length=40, top=8, temperatures=(0.0, 1.0), user_temperature=1.0, seed=5)
    steps = []
    elsewhere = FileLock(tmp_path / "shard-00000.lock", thread_local=False)
    elsewhere.acquire()

    def on_step():
        steps.append((tmp_path / "shard-00000.safetensors").exists())
        if len(steps) == plan.length:  # the other run breaks off
            elsewhere.release()

    write_corpus(tmp_path, plan, target, Words(), ["abc"], on_step)
    assert len(steps) == 2 * plan.length, "both shards were written, that of the other run last"
    everything = torch.arange(corpus.rows)
    assert torch.equal(Corpus(tmp_path, 2, CPU).take(everything).tokens, corpus.take(everything).tokens)


def test_soft_loss_is_the_kl_divergence_where_all_tokens_are_noted():
    torch.manual_seed(0)
    own, other = torch.randn(5, 8), torch.randn(5, 8)
    logprobs, ids = other.log_softmax(-1).sort(-1, descending=True)
    soft, hard, miss = losses(own, ids, logprobs)
    expected = torch.nn.functional.kl_div(own.log_softmax(-1), other.log_softmax(-1), log_target=True, reduction="none").sum(-1)
    assert torch.allclose(soft, expected, atol=1e-4)
    assert torch.allclose(hard, torch.nn.functional.cross_entropy(own, other.argmax(-1), reduction="none"))
    assert torch.allclose(miss, (own.softmax(-1) - other.softmax(-1)).abs().sum(-1) / 2, atol=1e-5), "the total variation distance"


def test_tokens_outside_the_draft_vocabulary_leave_the_loss():
    own = torch.tensor([[2.0, 1.0, 0.0]])
    logprobs = torch.tensor([[0.5, 0.3, 0.2]]).log()
    soft, hard, miss = losses(own, torch.tensor([[-1, 0, 1]]), logprobs)
    seen = torch.tensor([0.6, 0.4])
    expected = (seen * (seen.log() - own.log_softmax(-1)[0, :2])).sum()
    assert soft.item() == pytest.approx(expected.item(), abs=1e-3)
    assert hard.item() == 0
    q = own.softmax(-1)[0]
    assert miss.item() == pytest.approx(1 - min(q[0].item(), 0.3) - min(q[1].item(), 0.2), abs=1e-6)


@pytest.mark.parametrize("changes", [{}, {"miss_weight": 0.5}, {"optimizer": "muon"}])
def test_distillation_lowers_the_divergence_and_raises_acceptance(target, corpus, tmp_path, changes):
    drafter, heard = start_of(target), []
    for weight in drafter.trained().values():
        if weight.ndim == 2:
            weight.normal_(0, 0.02)
    prompts = [Prompt([*TEMPLATE.opening, token, *TEMPLATE.to_answer], "any") for token in range(20, 44)]
    texts = references(target, prompts, tokens=16, sample=True, seed=0, batch=8)
    before = evaluate(drafter, texts, k=4, seed=0)["overall"].length
    first: list[Step] = []
    distill(drafter, corpus, plan_of(steps=300, batch_rows=32, **changes), tmp_path, on_step=first.append, stop_at=1)
    distill(drafter, corpus, plan_of(steps=300, batch_rows=32, **changes), tmp_path, on_step=heard.append)
    assert heard[-1].soft < 0.7 * first[0].soft
    assert heard[-1].step == 300
    assert evaluate(drafter, texts, k=4, seed=0)["overall"].length > before


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_ends_with_the_weights_of_an_unbroken_one(target, corpus, tmp_path, optimizer):
    whole, broken = start_of(target), start_of(target)
    distill(whole, corpus, plan_of(optimizer=optimizer), tmp_path / "whole")
    assert distill(broken, corpus, plan_of(optimizer=optimizer), tmp_path / "broken", stop_at=8).steps == 8
    resumed = start_of(target, seed=99)
    assert distill(resumed, corpus, plan_of(optimizer=optimizer), tmp_path / "broken").steps == 20
    for name, weight in whole.trained().items():
        assert torch.equal(weight, resumed.trained()[name]), name
    with pytest.raises(ValueError, match="other settings"):
        distill(start_of(target), corpus, plan_of(optimizer=optimizer, learning_rate=1e-4), tmp_path / "broken")


def test_weights_that_are_no_numbers_are_not_kept(target, corpus, tmp_path):
    with pytest.raises(ValueError, match="by step 20 the weights are no numbers any more: lower --learning-rate"):
        distill(start_of(target), corpus, plan_of(learning_rate=1e30), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_known_acceptances_are_counted_exactly():
    chance = torch.Generator().manual_seed(0)
    everything = count_rounds(torch.ones(11), 4, chance)
    assert (everything.rounds, everything.emitted, everything.accepted) == (2, 10, (2, 2, 2, 2))
    assert everything.length == 5
    nothing = count_rounds(torch.zeros(11), 4, chance)
    assert (nothing.rounds, nothing.length, nothing.accepted) == (10, 1.0, (0, 0, 0, 0))
    mixed = count_rounds(torch.tensor([0.0, 1, 1, 0, 1, 0, 0]), 4, chance)
    assert (mixed.rounds, mixed.accepted) == (3, (2, 1, 0, 0))
    assert mixed.per_position[:2] == pytest.approx([2 / 3, 1 / 3])
    assert count_rounds(torch.ones(1), 4, chance).rounds == 0


def test_a_drafter_that_is_the_target_is_always_accepted(target):
    twin = Drafter(target, torch.arange(VOCABULARY))
    prompts = [Prompt([1, 3, 4, token], "twin") for token in range(10, 16)]
    for sample in (False, True):
        texts = references(target, prompts, tokens=20, sample=sample, seed=3, batch=4)
        assert all(torch.allclose(chances, torch.ones_like(chances), atol=1e-4) for chances in acceptance_probabilities(twin, texts))


def test_sampled_acceptance_is_the_overlap_of_the_distributions(target):
    drafter = start_of(target)
    prompt = [1, 3, 4, 30]
    p = target(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    q = drafter.logits(torch.tensor([prompt]))[0, -1].softmax(-1)
    texts = [Reference(Prompt(prompt, "all"), [token], p[token].log()[None]) for token in range(VOCABULARY)]
    accepted = torch.cat(acceptance_probabilities(drafter, texts))
    assert (accepted * p).sum().item() == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-4)


def test_tokens_outside_the_vocabulary_are_never_accepted(target):
    drafter = Drafter(target, torch.tensor([7, 8]))
    text = Reference(Prompt([1, 3], "x"), [9], torch.zeros(1))
    assert acceptance_probabilities(drafter, [text])[0].item() == 0


def test_vocabulary_holds_the_most_frequent_and_the_named_tokens():
    assert draft_vocabulary(torch.tensor([9, 0, 5, 7, 1]), 3, (1,)).tolist() == [0, 1, 3]
    assert [spread(n, 30) for n in (1, 2, 3)] == [[0], [0, 29], [0, 14, 29]]


def test_packed_drafter_comes_back_within_half_a_step(target, tmp_path):
    drafter = start_of(target, intermediate_size=48, token_ids=torch.tensor([1, 2, 5, 40]))
    target.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "tokenizer.json").write_text("{}")
    pack(drafter, tmp_path / "drafter.safetensors")
    (tmp_path / "drafter.md").write_text("card")
    assemble(tmp_path / "drafter.safetensors", tmp_path / "target", tmp_path / "out")
    loaded = Drafter.load(tmp_path / "out", CPU, torch.float32)
    assert loaded.token_ids.tolist() == [1, 2, 5, 40]
    for name, weight in drafter.trained().items():
        back = loaded.trained()[name]
        slack = weight.abs() / 128  # bfloat16 keeps eight bits
        bound = slack + (quantise(weight)[1][:, None] / 2 * 1.001 if weight.ndim == 2 else 0)
        assert bool(((back - weight).abs() <= bound).all()), name
    embedding = target.get_input_embeddings().weight.bfloat16().float()
    assert torch.equal(loaded.model.get_input_embeddings().weight, embedding)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in tmp_path.rglob("*.safetensors") if path.parent.name != "target")
    assert (tmp_path / "out" / "README.md").read_text() == "card"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert set(index["weight_map"]) == set(file.keys())
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "out")) is LlamaForCausalLM


def test_a_drafter_for_another_target_is_refused(target, tmp_path):
    pack(start_of(target), tmp_path / "drafter.safetensors")
    small = LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, head_dim=8)
    LlamaForCausalLM(small).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match=r"\(64, 32\).*\(48, 32\)"):
        assemble(tmp_path / "drafter.safetensors", tmp_path / "small", tmp_path / "out")


def test_prompts_are_read_from_lines_and_json(tmp_path: Path):
    file = tmp_path / "prompts"
    file.write_text('plain words\n\n{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    assert [question.words for question in read_prompts(file)] == ["plain words", "one", "two"]
    file.write_text('fine\n{"text": "x"}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_prompts(file)


def test_written_records_have_the_documented_shapes(corpus):
    batch = corpus.take(torch.arange(3))
    assert isinstance(batch, Written)
    assert (batch.tokens.shape, batch.answer.dtype, batch.top_ids.shape, batch.top_logprobs.dtype) == (
        (3, 40),
        torch.bool,
        (3, 40, 8),
        torch.float16,
    )
    assert corpus.frequencies(VOCABULARY).sum() == corpus.take(torch.arange(corpus.rows)).answer.sum()
