import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.ObjectMapper;
import io.debezium.embedded.Connect;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.RecordChangeEvent;
import io.debezium.engine.format.ChangeEventFormat;
import java.io.Reader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.connect.header.Header;
import org.apache.kafka.connect.source.SourceRecord;
import org.apache.kafka.connect.storage.Converter;
import org.apache.kafka.connect.storage.HeaderConverter;
import org.apache.kafka.connect.storage.SimpleHeaderConverter;

/**
 * Runs Debezium with the settings of a file, and prints each event as a line of JSON.
 *
 * <p>An event counts as delivered once its line is printed. Ends with its standard input.
 */
public class Router {
    private static final ObjectMapper JSON = new ObjectMapper();
    private final Converter keys;
    private final Converter values;
    private final HeaderConverter headers = new SimpleHeaderConverter(); // the default of Kafka Connect

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        try (Reader file = Files.newBufferedReader(Path.of(arguments[0]))) {
            settings.load(file);
        }
        Router router = new Router(settings);
        DebeziumEngine<RecordChangeEvent<SourceRecord>> engine = DebeziumEngine.create(ChangeEventFormat.of(Connect.class))
                .using(settings)
                .using(Router::end)
                .using(new Started())
                .notifying(router::deliver)
                .build();
        new Thread(engine, "engine").start();
        while (System.in.read() >= 0) {}
        Runtime.getRuntime().halt(0);
    }

    /** As Kafka Connect does, which makes bytes of what a connector gives it. */
    private Router(Properties settings) throws ReflectiveOperationException {
        keys = converter(settings, "key.converter");
        values = converter(settings, "value.converter");
    }

    private static Converter converter(Properties settings, String name) throws ReflectiveOperationException {
        Map<String, String> options = new HashMap<>();
        for (String each : settings.stringPropertyNames()) {
            if (each.startsWith(name + ".")) {
                options.put(each.substring(name.length() + 1), settings.getProperty(each));
            }
        }
        Object made = Class.forName(settings.getProperty(name)).getConstructor().newInstance();
        ((Converter) made).configure(options, name.startsWith("key"));
        return (Converter) made;
    }

    private void deliver(
            List<RecordChangeEvent<SourceRecord>> events,
            DebeziumEngine.RecordCommitter<RecordChangeEvent<SourceRecord>> committer)
            throws InterruptedException {
        for (RecordChangeEvent<SourceRecord> event : events) {
            print(describe(event.record()));
            committer.markProcessed(event);
        }
        committer.markBatchFinished();
    }

    private Map<String, Object> describe(SourceRecord record) {
        Map<String, Object> shown = new LinkedHashMap<>();
        for (Header header : record.headers()) {
            byte[] bytes = headers.fromConnectHeader(record.topic(), header.key(), header.schema(), header.value());
            shown.put(header.key(), bytes == null ? null : new String(bytes, StandardCharsets.UTF_8));
        }
        Map<String, Object> line = new LinkedHashMap<>();
        line.put("topic", record.topic());
        line.put("partition", record.kafkaPartition());
        line.put("key", keys.fromConnectData(record.topic(), record.keySchema(), record.key())); // bytes: base64
        line.put("value", values.fromConnectData(record.topic(), record.valueSchema(), record.value()));
        line.put("headers", shown);
        line.put("timestamp", record.timestamp());
        return line;
    }

    private static void print(Object line) {
        try {
            System.out.println(JSON.writeValueAsString(line));
        } catch (JsonProcessingException error) {
            throw new IllegalStateException(error);
        }
        if (System.out.checkError()) { // flushes, too
            throw new IllegalStateException("Nothing reads the events");
        }
    }

    private static void end(boolean success, String message, Throwable error) {
        if (!success) {
            System.err.println(message);
            Runtime.getRuntime().halt(1);
        }
    }

    private static class Started implements DebeziumEngine.ConnectorCallback {
        @Override
        public void pollingStarted() {
            System.out.println("{\"started\": true}");
        }
    }
}
