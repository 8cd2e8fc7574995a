package inspect

import (
	"strings"
	"testing"

	"nodeproxy/plan"
)

// TestLiveAnswer: an answer that a rule of this node drops, or that gets lost on it, is no answer to the client.
func TestLiveAnswer(t *testing.T) {
	const endpoint = "10.244.1.5:8080"
	dropped := []SeenStep{{TraceStep: TraceStep{Hook: "FORWARD", Table: "inet firewall", Chain: "filter", Rule: "tcp sport 8080 drop"}, Verdict: "drop"}}
	for _, c := range []struct {
		answer *SeenAnswer
		row    string // as printed
		differ string
	}{
		{&SeenAnswer{Action: "pass"}, "yes", ""},
		{&SeenAnswer{Action: "drop", Steps: dropped}, "the answer was dropped on this node",
			"the answer came to this node, and was dropped by chain filter of table inet firewall: tcp sport 8080 drop"},
		{&SeenAnswer{Action: Lost, Steps: dropped}, "the answer was lost on this node",
			"the answer came to this node, and got no further than hook FORWARD: no rule has dropped it. Is there a route to the client?"},
		{nil, "yes, but the answer was not seen to pass this node's last hook", ""},
	} {
		s := SeenPacket{Source: "192.0.2.7:1", Destination: "10.96.0.10:80", Action: "forward", Endpoint: endpoint, Answered: true, Answer: c.answer}
		s.Compare(&PacketTrace{Action: "forward", Protocol: plan.TCP, Outcomes: []TraceOutcome{{Action: "forward", Endpoint: endpoint, Probability: 1}}})
		l := Live{Trace: &Trace{}, Seen: []SeenPacket{s}}
		if got := strings.Join(s.Differences, "\n"); got != c.differ || l.Problem() != (c.differ != "") || s.Answered != (c.differ == "") {
			t.Errorf("%+v: differs %q, problem %v, answered %v; want %q", c.answer, got, l.Problem(), s.Answered, c.differ)
		}
		var out strings.Builder
		if err := WriteLive(&out, &l); err != nil || !strings.Contains(out.String(), "  answered   -") || !strings.Contains(out.String(), " "+c.row+"\n") {
			t.Errorf("%v: no %q in\n%s", err, c.row, out.String())
		}
	}
}

// TestLiveUnanswered: connections that went where they should are not praised if there was no answer.
func TestLiveUnanswered(t *testing.T) {
	t.Parallel()
	forwarded := SeenPacket{Source: "192.0.2.7:1", Destination: "10.96.0.10:80", Action: "forward", Endpoint: "10.0.0.1:80",
		Prediction: &PacketTrace{Action: "forward", Outcomes: []TraceOutcome{{Action: "forward", Endpoint: "10.0.0.1:80", Probability: 1}}}}
	untold := SeenPacket{Source: "192.0.2.7:1", Destination: "10.96.0.10:80", Action: Lost, Endpoint: "10.0.0.1:80", Bridge: "cni0", Answered: true}
	untold.Compare(forwarded.Prediction)
	answered := forwarded
	answered.Answered = true
	refused := answered
	refused.Answer = &SeenAnswer{Action: "pass", Refuses: true, From: "10.0.0.1:80", In: "eth0"}
	for want, seen := range map[string][]SeenPacket{
		"\nThe connection went as predicted.\n":                            {answered},
		"\nAll 2 connections went as predicted.\n":                         {answered, answered},
		"\nAll 2 connections went as predicted, but 1 had no answer: see ": {answered, forwarded},
		"\nConnection 2: 192.0.2.7:1 to 10.96.0.10:80\n  Connection 1 again, of which this is one more packet before an answer.\n":    {forwarded, forwarded},
		"  Behind bridge cni0 (br_netfilter), the kernel tells nothing of it: it may have met rules that are only predicted below.\n": {untold},
		"\nThe connection went as predicted, but 1 had a reset (RST) for an answer: see whether anything listens at the endpoint.\n":  {refused},
		"  answered   -                   refused: a reset (RST) came from 10.0.0.1:80 by eth0\n":                                     {refused},
	} {
		var out strings.Builder
		l := &Live{Trace: &Trace{}, Seen: seen}
		if strings.Contains(want, "RST") != l.Problem() {
			t.Errorf("%s: problem %v", want, l.Problem())
		}
		if err := WriteLive(&out, l); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%v, want %q in:\n%s", err, want, &out)
		}
	}
}
