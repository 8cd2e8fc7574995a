package proxier

import (
	"net/netip"
	"strconv"
	"strings"

	"nodeproxy/source"
	"nodeproxy/topology"
)

// mostWrongWeights is the number of wrong parts of one annotation that are reported each; a slice can have a thousand.
const mostWrongWeights = 5

// setWeights sets the weights of a slice's endpoints from its annotation, a comma-separated list of ADDRESS=WEIGHT.
func setWeights(text string, endpoints []topology.Endpoint, f *source.Findings) {
	wrong := 0
	problem := func(detail string, args ...any) {
		if wrong++; wrong <= mostWrongWeights {
			f.Problem(annotationField(source.AnnotationWeights), "this weight is ignored", detail, args...)
		}
	}
	index := make(map[netip.Addr][]int, len(endpoints))
	for i, ep := range endpoints {
		index[ep.Addr.Addr()] = append(index[ep.Addr.Addr()], i)
	}
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		address, number, ok := strings.Cut(part, "=")
		ip, isIP := source.ParseIP(strings.TrimSpace(address))
		weight, err := strconv.ParseUint(strings.TrimSpace(number), 10, 16)
		switch at := index[ip]; {
		case !ok || !isIP:
			problem("%.80q is not of the form ADDRESS=WEIGHT", part)
		case err != nil || weight == 0:
			problem("%.80q: the weight is not within 1-65535", part)
		case len(at) == 0:
			problem("%.80q: the slice has no endpoint in use at this address", part)
		case endpoints[at[0]].Weight != 0:
			problem("%.80q: the address has a weight already, %d", part, endpoints[at[0]].Weight)
		default:
			for _, i := range at {
				endpoints[i].Weight = uint16(weight)
			}
		}
	}
	if wrong > mostWrongWeights {
		f.Problem(annotationField(source.AnnotationWeights), "they are ignored", "%d more parts are wrong", wrong-mostWrongWeights)
	}
}
