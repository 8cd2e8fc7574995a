package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"nodeproxy/e2e/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// TestSmallRun measures everything with a few Services. A busy machine may miss the goals; what counts is that everything was answered.
func TestSmallRun(t *testing.T) {
	t.Parallel()
	code := run(t.Context(), []string{"-services=200", "-rounds=1", "-changes=1", "-blocks=1"})
	if code != 0 && code != 1 {
		t.Errorf("exit code %d, want 0 or 1", code)
	}
}

// TestTablesJudgeByTheGoals: a goal that is just met counts as met, and each that is missed is counted.
func TestTablesJudgeByTheGoals(t *testing.T) {
	one := []time.Duration{time.Millisecond}
	none := changes{all: one, wait: one, plan: one, write: one}
	for _, test := range []struct {
		took, held time.Duration
		want       int
	}{{goal, holdGoal, 0}, {goal + 1, holdGoal, 1}, {goal, holdGoal + 1, 1}, {goal + 1, holdGoal + 1, 2}} {
		var out strings.Builder
		got := printTables(&out, options{}, []answer{
			{question: question{name: "get", goal: goal}, took: []time.Duration{test.took}},
			{question: question{name: "diff"}, took: []time.Duration{time.Hour}},
		}, []hold{{"/v1/services", []time.Duration{test.held}}}, [kinds]changes{none, none, none})
		if got != test.want || strings.Count(out.String(), "MISSED") != test.want {
			t.Errorf("%d goals missed, want %d:\n%s", got, test.want, out.String())
		}
	}
}

func TestFlagsAreChecked(t *testing.T) {
	for _, args := range []string{"-services=99", "-services=15838", "-rounds=0", "-changes=0", "-blocks=0", "-mode=userspace", "more"} {
		if _, err := parse(strings.Fields(args)); err == nil {
			t.Errorf("%s: no error", args)
		}
	}
	if _, err := parse(nil); err != nil {
		t.Errorf("defaults: %v", err)
	}
}
