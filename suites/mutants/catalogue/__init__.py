"""All mutants, by family, and beside them the variants.

A family is a file that is read in one sitting; names are unique over all of them.
"""

from __future__ import annotations

from suites.mutants.catalogue.axes.context import CONTEXT
from suites.mutants.catalogue.axes.data_parallel import DATA_PARALLEL
from suites.mutants.catalogue.axes.dropped import DROPPED
from suites.mutants.catalogue.axes.gradients import GRADIENTS
from suites.mutants.catalogue.axes.pipelines import PIPELINES
from suites.mutants.catalogue.axes.randomness import RANDOMNESS
from suites.mutants.catalogue.axes.recompute import RECOMPUTE
from suites.mutants.catalogue.collectives.boundaries import BOUNDARIES
from suites.mutants.catalogue.collectives.exposed import EXPOSED
from suites.mutants.catalogue.collectives.factors import FACTORS
from suites.mutants.catalogue.collectives.groups import GROUPS
from suites.mutants.catalogue.collectives.orders_and_parts import ORDERS_AND_PARTS
from suites.mutants.catalogue.collectives.overlap_and_buffers import OVERLAP_AND_BUFFERS
from suites.mutants.catalogue.collectives.reductions import REDUCTIONS
from suites.mutants.catalogue.data.data_and_positions import DATA_AND_POSITIONS
from suites.mutants.catalogue.data.shared_data import SHARED_DATA
from suites.mutants.catalogue.data.steps_and_counts import STEPS_AND_COUNTS
from suites.mutants.catalogue.model.layouts import LAYOUTS
from suites.mutants.catalogue.model.model_rules import MODEL_RULES
from suites.mutants.catalogue.model.norms_and_clip import NORMS_AND_CLIP
from suites.mutants.catalogue.model.uneven_shares import UNEVEN_BOUNDARIES, UNEVEN_LAYOUTS, UNEVEN_REDUCTIONS
from suites.mutants.catalogue.model.vocabulary_and_loss import VOCABULARY_AND_LOSS
from suites.mutants.catalogue.training.optimizer_and_loop import OPTIMIZER_AND_LOOP
from suites.mutants.catalogue.training.optimizer_rules import OPTIMIZER_RULES
from suites.mutants.catalogue.training.reports import REPORTS
from suites.mutants.catalogue.training.shares_and_updates import SHARES_AND_UPDATES
from suites.mutants.catalogue.variants import VARIANT_ROWS
from suites.mutants.mutant import Mutant

__all__ = ["FAMILIES", "MUTANTS", "VARIANT_ROWS"]

FAMILIES: dict[str, tuple[Mutant, ...]] = {
    "reductions": (*REDUCTIONS, *UNEVEN_REDUCTIONS),
    "boundaries": (*BOUNDARIES, *UNEVEN_BOUNDARIES),
    "factors": FACTORS,
    "norms_and_clip": NORMS_AND_CLIP,
    "layouts": (*LAYOUTS, *UNEVEN_LAYOUTS),
    "groups": GROUPS,
    "vocabulary_and_loss": VOCABULARY_AND_LOSS,
    "overlap_and_buffers": (*OVERLAP_AND_BUFFERS, *EXPOSED, *RECOMPUTE),
    "data_and_positions": (*DATA_AND_POSITIONS, *CONTEXT),
    "shared_data": SHARED_DATA,
    "optimizer_and_loop": OPTIMIZER_AND_LOOP,
    "steps_and_counts": STEPS_AND_COUNTS,
    "model_rules": MODEL_RULES,
    "optimizer_rules": OPTIMIZER_RULES,
    "reports": REPORTS,
    "orders_and_parts": (*ORDERS_AND_PARTS, *PIPELINES),
    "randomness": (*RANDOMNESS, *DROPPED),
    "shares_and_updates": (*SHARES_AND_UPDATES, *DATA_PARALLEL, *GRADIENTS),
}
"""File of the catalogue -> its mutants."""
MUTANTS: tuple[Mutant, ...] = tuple(mutant for family in FAMILIES.values() for mutant in family)
"""Every mutant of the catalogue."""
