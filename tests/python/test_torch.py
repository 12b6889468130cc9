"""tercet.torch.attend: its gradients, and what torch's own checks say of the operators."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conftest import INFO, RULES, layer  # noqa: E402

import tercet  # noqa: E402
import tercet.torch  # noqa: E402
from tercet import _core  # noqa: E402
from tercet.torch import _ops, attend  # noqa: E402

torch.set_num_threads(1)
ADDING = [rule for rule in RULES if INFO[rule].can_normalize]
ORDER = ("q", "k", "v", "log_decay", "beta", "remove", "write", "bonus", "initial_state", "initial_key_sum", "offsets", "valid")


def call_of(rule, *, dtype=torch.float64, state=True, normalize=False, sequences=None, grad=True, **sizes):
    """Keyword arguments of attend: random tensors, those of a floating dtype with requires_grad."""
    sizes = {"batch": 2, "tokens": 5, "heads": 2, "key_dim": 3, "value_dim": 2, **sizes}
    call = {name: value if name == "rule" else torch.from_numpy(value).to(dtype) for name, value in layer(rule, dtype=np.float64, **sizes).items()}
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(1)
    shape = (sequences or call["q"].shape[0], max(call["k"].shape[2], call["v"].shape[2]), call["q"].shape[3])
    if state:
        call["initial_state"] = torch.randn(*shape, call["v"].shape[3], generator=generator, dtype=wide)
    if normalize:
        call["normalize"] = True
        call["q"], call["k"] = call["q"].abs() + 0.5, call["k"].abs() + 0.5  # denominators away from zero
        if state:
            call["initial_key_sum"] = torch.rand(shape, generator=generator, dtype=wide)
    for value in call.values():
        if grad and isinstance(value, torch.Tensor):
            value.requires_grad_()
    return call


def split(call):
    """(names of the tensors that require gradients, those tensors, the rest of the call)."""
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    return list(tensors), tuple(tensors.values()), {name: value for name, value in call.items() if name not in tensors}


def check_gradients(call):
    names, tensors, rest = split(call)

    def function(*tensors):
        return attend(**dict(zip(names, tensors, strict=True)), **rest, return_state=True)

    assert torch.autograd.gradcheck(function, tensors)


def positional(call, return_state=True, return_saved=False):
    """The arguments of torch.ops.tercet.attend."""
    defaults = {"form": "automatic", "feature_map": "identity", "eps": 1e-6, "normalize": False, "check_values": True, "threads": 0}
    options = [call.get(name, defaults.get(name)) for name in _ops._OPTIONS]
    return (*(call.get(name) for name in ORDER), *options, return_state, return_saved)


# ---- Gradients ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["automatic", "recurrent", "chunkwise", "parallel"])
def test_gradcheck_of_each_rule_and_form(rule, form):
    check_gradients({**call_of(rule), "form": form, "chunk": 2 if form == "chunkwise" else None})


@pytest.mark.parametrize("feature_map", ["elu_plus_one", "relu", "l2_norm"])
def test_gradcheck_of_feature_maps(feature_map):
    check_gradients({**call_of("linear"), "feature_map": feature_map})
    check_gradients({**call_of("gated_delta"), "feature_map": feature_map, "scale": 0.7, "eps": 1e-3})


@pytest.mark.parametrize("adding", ADDING)
def test_gradcheck_of_the_normaliser(adding):
    check_gradients(call_of(adding, normalize=True))


@pytest.mark.parametrize("heads, k_heads", [(4, 2), (2, 1)])
def test_gradcheck_of_grouped_heads(rule, heads, k_heads):
    call = call_of(rule, heads=heads, k_heads=k_heads)
    check_gradients(call)
    q = call["q"].detach()[:, :, :1].requires_grad_()  # fewer heads of q than of v
    check_gradients({**call, "q": q})


def test_gradcheck_of_gates_that_heads_share():
    call = call_of("kda")
    for name in ("log_decay", "beta"):
        call[name] = call[name].detach()[:, :, :1].requires_grad_()
    check_gradients(call)


def test_gradcheck_of_packed_sequences(rule):
    call = call_of(rule, batch=1, sequences=3)
    check_gradients({**call, "offsets": torch.tensor([0, 2, 2, 5])})


def test_gradcheck_of_invalid_tokens(rule):
    valid = torch.tensor([[True, False, True, True, True], [False, False, True, True, False]])
    check_gradients({**call_of(rule), "valid": valid})


def test_only_wanted_gradients_are_computed(rule, monkeypatch):
    asked = []

    def gradient(*args):
        asked.append(args)
        return original(*args)

    original = _core.gradient
    monkeypatch.setattr(_core, "gradient", gradient)
    call = call_of(rule, grad=False)
    names = [name for name in ORDER if name in call]
    for name in names:
        tensor = call[name].clone().requires_grad_()
        out, _ = attend(**{**call, name: tensor}, return_state=True)
        out.sum().backward()
        assert tensor.grad.shape == tensor.shape
        assert asked[-1][-1] == [name]
        assert asked[-1][2] is not None and asked[-1][3:5] == (None, None)  # of an output that was not used there are no zeros


def test_gradient_of_the_final_state_alone(rule):
    call = call_of(rule)
    _, state = attend(**call, return_state=True)
    weight = torch.randn_like(state)
    names, tensors, rest = split(call)
    found = torch.autograd.grad(state, tensors, weight)
    plain = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    want = tercet.gradient(**plain, grad_final_state=weight, wanted=names)
    for name, gradient in zip(names, found, strict=True):
        assert torch.equal(gradient, getattr(want, name)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_narrow_dtypes(rule, dtype):
    call = call_of(rule, dtype=dtype, tokens=20)
    names, tensors, rest = split(call)
    out, state = attend(**call, return_state=True)
    assert out.dtype == dtype and state.dtype == torch.float32
    weight = torch.randn(out.shape).to(dtype)
    found = torch.autograd.grad(out, tensors, weight, retain_graph=True)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    want = torch.autograd.grad(attend(**dict(zip(names, wide, strict=True)), **rest), wide, weight.double())
    # Inside all is f32, so what is left is the rounding of the gradient to its dtype, at most half a step, and f32's own noise.
    for name, one, other, tensor in zip(names, found, want, tensors, strict=True):
        assert one.dtype == tensor.dtype
        epsilon = torch.finfo(tensor.dtype).eps / 2 + 1e-5
        assert (one.double() - other).abs().max() <= epsilon * other.abs().max(), name


def test_no_second_derivatives():
    call = call_of("gated_delta")
    loss = attend(**call).square().sum()
    (plain,) = torch.autograd.grad(loss, call["q"], retain_graph=True)
    (kept,) = torch.autograd.grad(loss, call["q"], create_graph=True)
    assert torch.equal(plain, kept)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        kept.sum().backward()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.gradgradcheck(lambda q: attend(**{**call, "q": q}), call["q"])
    call = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    grad = torch.ones_like(call["v"]).requires_grad_()
    (found,) = torch.ops.tercet.gradient(*positional(call)[:-2], grad, None, None, None, ["q"])
    with pytest.raises(NotImplementedError, match="second derivatives"):
        found.sum().backward()


def test_no_forward_mode():
    """It is refused, not taken for a call without derivatives."""
    call = call_of("linear", grad=False)
    for function in (attend, tercet.attend, lambda **call: torch.ops.tercet.attend(*positional(call))):
        with torch.autograd.forward_ad.dual_level():
            function(**call)
            dual = torch.autograd.forward_ad.make_dual(call["q"], torch.ones_like(call["q"]))
            with pytest.raises(NotImplementedError, match="forward mode"):
                function(**{**call, "q": dual})


# ---- What torch does to graphs --------------------------------------------------------------------------------------------------------------


def test_an_input_that_was_changed_is_noticed():
    call = call_of("linear", grad=False)
    call["v"].requires_grad_()
    loss = attend(**call).sum()
    call["q"].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_saved_states_may_be_moved(rule):
    """By hooks on saved tensors, as offloading does; and forgotten and made again, as checkpointing does."""
    names, tensors, rest = split(call_of(rule, tokens=40))

    def function(*tensors):
        return attend(**dict(zip(names, tensors, strict=True)), **rest)

    want = torch.autograd.grad(function(*tensors).sum(), tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor.clone()):
        out = function(*tensors)
    again = torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False)
    for result in (out, again):
        for one, other in zip(torch.autograd.grad(result.sum(), tensors), want, strict=True):
            assert torch.equal(one, other)


def test_without_gradients_there_is_no_graph(rule):
    call = call_of(rule)
    with torch.no_grad():
        out, state = attend(**call, return_state=True)
    assert not out.requires_grad and not state.requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(**call), out)
    assert torch.equal(attend(**call).detach(), out)
    assert torch.equal(tercet.attend(**call).detach(), out) and tercet.attend(**call).requires_grad


def test_autocast():
    call = call_of("gated_delta", dtype=torch.float32, tokens=30)
    names, tensors, rest = split(call)
    for record in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(record):
            out, state = attend(**call, return_state=True)
        assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
        narrow = {**call, **{name: call[name].bfloat16() for name in "qkv"}}
        assert torch.equal(out, attend(**narrow))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = attend(**call).sum()
    loss.backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = {**call, "q": call["q"].bfloat16(), "beta": call["beta"].half(), "initial_state": call["initial_state"].bfloat16()}
        assert attend(**mixed).dtype == torch.bfloat16
        assert attend(**call_of("gated_delta")).dtype == torch.float64


# ---- Operators ------------------------------------------------------------------------------------------------------------------------------


def opcheck_cases(rule):
    call = call_of(rule)
    call["k"] = call["k"].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()  # heads before tokens in memory
    yield {**call, "form": "chunkwise", "chunk": 2}
    if rule not in ("linear", "kda"):
        return
    yield {**call_of(rule, batch=1, sequences=3, state=False, dtype=torch.float32), "offsets": torch.tensor([0, 2, 2, 5])}
    yield {**call_of(rule, dtype=torch.bfloat16, heads=4, k_heads=2), "valid": torch.rand(2, 5) < 0.7}
    if rule in ADDING:
        yield call_of(rule, normalize=True)


def test_opcheck(rule):
    for call in opcheck_cases(rule):
        torch.library.opcheck(torch.ops.tercet.attend.default, positional(call, return_state="initial_state" in call))
        # The kept states hold bytes that mean nothing, which the check of tracing would compare; test_compile goes through them.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(torch.ops.tercet.attend.default, positional(call, True, True), test_utils=checks)
        names, tensors, _ = split(call)
        call = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        out, *states, saved = torch.ops.tercet.attend(*positional(call, True, True))
        grads = [torch.randn_like(result) for result in (out, *states)] + [None] * (2 - len(states))
        wanted = names[::-1]
        torch.library.opcheck(torch.ops.tercet.gradient.default, (*positional(call)[:-2], *grads, saved, wanted))


def test_fake_tensors_have_the_shapes(rule):
    from torch._subclasses.fake_tensor import FakeTensorMode

    cases = list(opcheck_cases(rule))
    for call in cases:
        real = attend(**call, return_state=True)
        with FakeTensorMode() as mode:
            fake = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
            results = attend(**fake, return_state=True)
        assert len(real) == len(results)
        for one, other in zip(real, results, strict=True):
            assert (one.shape, one.dtype, one.stride(), one.requires_grad) == (other.shape, other.dtype, other.stride(), other.requires_grad)


def compiled_and_not(function, tensors, **options):
    compiled = torch.compile(function, fullgraph=True, **options)
    for run in (compiled, function):
        yield torch.autograd.grad(run(*tensors), tensors)


def test_compile(rule):
    torch.compiler.reset()
    form = "parallel" if rule == "gla" else "automatic"
    names, tensors, rest = split({**call_of(rule, tokens=40), "form": form})

    def function(*tensors):
        out, state = attend(**dict(zip(names, tensors, strict=True)), **rest, return_state=True)
        return (out.sin() * 2).sum() + state.square().sum()

    for one, other in zip(*compiled_and_not(function, tensors, backend="aot_eager"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors), function(*tensors))


def test_compile_with_dynamic_shapes(rule):
    torch.compiler.reset()
    names, _, rest = split(call_of(rule))

    def function(*tensors):
        return attend(**dict(zip(names, tensors, strict=True)), **rest).square().sum()

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, tokens in ((11, 7), (13, 19), (17, 40)):  # sizes that are equal by chance would be taken for one
            _, tensors, _ = split(call_of(rule, batch=batch, tokens=tokens, value_dim=5))
            for one, other in zip(torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(function(*tensors), tensors), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_compile_packed_sequences():
    torch.compiler.reset()
    call = call_of("gated_delta", batch=1, tokens=40, sequences=3)
    names, tensors, rest = split(call)

    def function(offsets, *tensors):
        return attend(**dict(zip(names, tensors, strict=True)), **rest, offsets=offsets).square().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for offsets in (torch.tensor([0, 10, 10, 40]), torch.tensor([0, 1, 39, 40])):
        got, want = (torch.autograd.grad(run(offsets, *tensors), tensors) for run in (compiled, function))
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_compile_to_code():
    """By inductor, with work before and after, in f32."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        pytest.skip(f"inductor finds no compiler: {error}")
    torch.compiler.reset()
    names, tensors, rest = split(call_of("gated_delta", dtype=torch.float32, tokens=40))

    def function(*tensors):
        call = dict(zip(names, tensors, strict=True))
        call["log_decay"] = -torch.nn.functional.softplus(call["log_decay"])
        return attend(**call, **rest).sin().sum()

    for one, other in zip(*compiled_and_not(function, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# ---- Refusals -------------------------------------------------------------------------------------------------------------------------------


def test_refusals_are_the_librarys(rule):
    call = call_of(rule)
    with pytest.raises(ValueError, match="v has shape"):
        attend(**{**call, "v": call["v"][:, :4]})
    with pytest.raises(ValueError, match="v has shape"):
        torch.ops.tercet.attend(*positional({**call, "v": call["v"][:, :4]}))
    with pytest.raises(ValueError, match="rule is 'nothing'"):
        attend(**{**call, "rule": "nothing"})
    for record in (True, False):
        with torch.set_grad_enabled(record):
            with pytest.raises(TypeError, match="^k is "):
                attend(**{**call, "k": call["k"].detach().to("meta")})
            with pytest.raises(TypeError, match="k is a ndarray and must be a torch.Tensor"):
                attend(**{**call, "k": call["k"].detach().numpy()})
            with pytest.raises(TypeError, match="q is a NoneType"):
                attend(**{**call, "q": None})
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        attend(**call, out=None)
