"""Names to modules: known, nearest, and no torch on the way."""

import subprocess
import sys
from pathlib import Path

import pytest

from vitrail.config.finding import Refused
from vitrail.models.registry import ARCHITECTURES, load_entry, load_processor


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_row_names_a_module_with_the_entry_s_functions(architecture: str) -> None:
    entry = load_entry(architecture)
    assert all(callable(f) for f in (entry.read_config, entry.weight_map, entry.build))


def test_an_unknown_architecture_names_the_known_and_the_nearest() -> None:
    with pytest.raises(Refused) as caught:
        load_entry("KimiVLForCondGeneration")
    (finding,) = caught.value.findings
    assert finding.code == "unknown_architecture"
    assert "'KimiVLForCondGeneration'" in finding.saw
    assert all(name in finding.rule for name in ARCHITECTURES)
    assert finding.rule.endswith("the nearest is KimiVLForConditionalGeneration")


def test_an_architecture_like_no_other_has_no_nearest() -> None:
    with pytest.raises(Refused) as caught:
        load_entry("xyz")
    assert "nearest" not in caught.value.findings[0].rule


def test_a_text_model_has_no_processor(tmp_path: Path) -> None:
    assert load_processor("DeepseekV3ForCausalLM", tmp_path) is None


def test_the_registry_and_kimi_s_processor_import_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from vitrail.models import registry\n"
        "assert 'vitrail.models.interface' not in sys.modules\n"
        "row = registry.find('KimiVLForConditionalGeneration')\n"
        "import importlib; importlib.import_module(row.processor[0])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
