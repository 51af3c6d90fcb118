/* reference.h: the definition of the operator in float64, token by token (see flash_kda.h). */
#ifndef FKDA_REFERENCE_H
#define FKDA_REFERENCE_H

#include "core/plan.h"

/* Walks every sequence and head of the plan. Needs 8 V K bytes of memory of its own. */
fkda_status fkda_reference_forward(const struct fkda_plan *plan, struct fkda_reason reason);

#endif /* FKDA_REFERENCE_H */
