"""The map of a failed case: its rows in the order of training, whatever the first place is."""

from pathlib import Path

from shardproof.reports.stored.failures import maps_of_cases

ERRORS = """case,name,step,phase,region,error,allowed,first
tp=2,grad/head.weight,0,backward,head,2.0,1e-09,
tp=2,grad/layers.0.up.weight,0,backward,layers.0.up,2.0,1e-09,
tp=2,param/head.weight,1,step,head,2.4,1e-09,
tp=2,param/layers.0.up.weight,1,step,layers.0.up,2.7,1e-09,
tp=2,param/embed.weight,1,step,embed,2.7,1e-09,
tp=2,,0,forward,layers.0.up,0.0,0.0,yes
"""


def test_rows_are_in_the_order_of_training_though_the_first_place_is_a_later_layer(tmp_path: Path) -> None:
    (tmp_path / "errors.csv").write_text(ERRORS)
    drawn = maps_of_cases(tmp_path, {"tp=2"})["tp=2"]
    assert [layer for layer, _ in drawn.rows] == ["embed", "layers.0", "head"]
    assert [layer for layer, cells in drawn.rows if any(cell.first for cell in cells)] == ["layers.0"]
