package source

import (
	"slices"
	"time"
)

// Verification is a comparison of all that this program holds with what it is made from.
type Verification struct {
	Began       time.Time `json:"began"`
	TookSeconds float64   `json:"tookSeconds"`
	// Finished is false while it goes on: the rest is what is known so far.
	Finished    bool         `json:"finished"`
	Compared    []Compared   `json:"compared"`
	Differences []Difference `json:"differences"`
}

// Whole reports whether everything was compared.
func (v Verification) Whole() bool {
	return v.Finished && !slices.ContainsFunc(v.Compared, func(c Compared) bool { return c.Not != "" })
}

// Good reports whether everything was compared and nothing differed.
func (v Verification) Good() bool { return v.Whole() && len(v.Differences) == 0 }

// Difference is one between what there is and what was made of it.
type Difference struct {
	// Part is what was compared: objects with the API server, the plan with the objects, or the kernel with the plan.
	Part string `json:"part"`
	// Object is kind and name, such as "EndpointSlice shop/web-x2v9k", Field the path of the field in question; "" for the object as a whole.
	Object string `json:"object"`
	Field  string `json:"field,omitempty"`
	Detail string `json:"detail"`
}

// The parts of a Difference.
const (
	PartObjects = "objects"
	PartPlan    = "plan"
	PartKernel  = "kernel"
)

func (d Difference) String() string {
	s := d.Object + ": "
	if d.Field != "" {
		s += d.Field + ": "
	}
	return s + d.Detail
}

// Compared says how much was compared of something.
type Compared struct {
	// What is such as "EndpointSlices of the API server".
	What  string `json:"what"`
	Count int    `json:"count"`
	// Not is why it could not be compared; "" if it was.
	Not string `json:"not,omitempty"`
}
